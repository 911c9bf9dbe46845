"""The paper's tables and figures from logit tables: `python -m jobs.paper --config jobs/paper/public.yaml`."""
