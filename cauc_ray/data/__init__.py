"""Logit tables, splits and the files that runs read and write."""
