"""Pools of real models, and the factories that they need beyond what cauc-ray loads by itself."""
