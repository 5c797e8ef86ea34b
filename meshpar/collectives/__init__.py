"""Communication that GSPMD cannot be asked for: collectives with a dtype, an order or a schedule of their own."""
