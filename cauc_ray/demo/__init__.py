"""`cauc demo`: the whole path, on real images, without a network."""
