"""The level presets, installed as package data of `gradguard.configs`."""
