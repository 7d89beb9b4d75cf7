"""Runners: they load the model, own the device's memory and compute the steps that the scheduler plans."""
