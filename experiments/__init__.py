"""Scripts that answer one question each, and the recipes they share."""
