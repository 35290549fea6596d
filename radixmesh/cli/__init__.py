"""The `radixmesh` command.

Layout:
  main       names, options, exit codes
  plan       flags -> which processes, on which ports
  processes  one process kept running, and ended for good
  mesh       a local mesh: started, watched until it serves, ended
  up, demo   the mesh in the foreground; the mesh shown at work
  chat, show a conversation; tables and JSON

Imports no service: it starts them as processes and talks to them by the SDK or HTTP.
"""
