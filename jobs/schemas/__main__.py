"""Write the schemas of this version's configs."""

from cauc_ray.files.documents import write_json
from jobs.schemas import JOBS, job_named, schema_of, schema_path

for name in JOBS:
    write_json(schema_path(name), schema_of(job_named(name)))
