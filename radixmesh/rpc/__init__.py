"""Servers, channels, links and error translation: all that services share of gRPC.

Layout:
  link          the router's end of links, and the front door: import links from here
  dial          one dial of a link, and the back-off between them
  serve         the body of a servicer's `Attach`
  session       the service's end of one link
  pump          one connected stream: write, read, ping, notice silence
  frames        limits, names, the hello
  lanes         pure: priority lanes, joining, fragments
  status        MeshError <-> google.rpc.Status and link Failure
  interceptors  errors become statuses, request ids travel
  server        services, health, reflection, drain
  channel       keepalive and bounds of channels
  lifecycle     title, logs, signals of a process
"""
