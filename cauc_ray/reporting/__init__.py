"""One page that shows a policy: what it costs and gains, where it errs, and how it came about."""
