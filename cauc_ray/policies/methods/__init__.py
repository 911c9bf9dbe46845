"""The methods of CAUC, each in a file."""
