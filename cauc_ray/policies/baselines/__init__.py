"""The methods that CAUC is compared with, each fitted from the same saved outputs."""
