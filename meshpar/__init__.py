"""meshpar trains large transformers on a named mesh of devices."""
