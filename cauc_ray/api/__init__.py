"""The Python API: what `import cauc_ray` gives, and what its functions share."""
