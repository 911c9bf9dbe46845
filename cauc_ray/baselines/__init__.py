"""The methods that CAUC is compared with, each in a file, fitted from the same saved outputs."""
