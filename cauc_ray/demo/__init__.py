"""`cauc demo`: the whole path, on real images, without a network."""

from cauc_ray.demo.pipeline import run_demo

__all__ = ["run_demo"]
