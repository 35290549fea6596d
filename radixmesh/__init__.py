"""What every service of the mesh shares: contracts, errors, links, settings, client SDK, CLI.

Layout:
  common, tokenizer, detokenizer, worker, router   generated from protos/, never edited
  errors     the error tree and the table reason -> code -> what the caller does
  blocks     chained block keys: router and workers agree on them byte for byte
  settings   flags over environment over file over defaults
  models     where a model directory is found by name
  telemetry  logs and metrics
  rpc        servers, channels, links, error translation
  client     the SDK
  cli        the `radixmesh` command

No service (router, worker, tokenizer_svc) is imported from here.
"""

__version__ = "0.1.0"
