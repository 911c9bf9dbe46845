"""The networks that some of the methods train, with torch, which only their fits import."""
