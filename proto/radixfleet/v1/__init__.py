"""Generated messages and stubs of protobuf package radixfleet.v1. Do not edit: change the .proto and run `make proto`."""
