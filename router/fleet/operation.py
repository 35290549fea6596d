"""What an administrator asks of a worker group, one call each. Knows its plain RPCs; no link."""

import grpc.aio

from radixmesh.rpc.channel import open_channel
from radixmesh.rpc.status import from_rpc_error
from radixmesh.worker.v1 import worker_service_pb2 as pb
from radixmesh.worker.v1.worker_service_pb2_grpc import WorkerServiceStub

TIMEOUT_S = 10.0


async def flush_cache(address: str, *, timeout_s: float = TIMEOUT_S) -> int:
    """Empty the prefix caches of all replicas of a group; return how many blocks went.

    Raises:
        MeshError: It can't be reached, or says no.
    """
    channel = open_channel(address)
    try:
        call = WorkerServiceStub(channel).FlushCache
        answer: pb.FlushCacheResponse = await call(pb.FlushCacheRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    finally:
        await channel.close()
    return answer.removed_block_count
