"""Write the schemas of this version's files into the package."""

from cauc_ray.files.documents import write_json
from cauc_ray.schemas import SCHEMAS, schema_path

for name, schema in SCHEMAS.items():
    write_json(schema_path(name), schema())
