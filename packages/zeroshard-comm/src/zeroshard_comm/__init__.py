"""Moves shards between ranks: reduction, broadcast, agreement, state transfer, rank arithmetic, traffic counters."""

from zeroshard_comm.agreement import Coordinator, Position, agree, agreed, check_config
from zeroshard_comm.collectives import STAGING_BYTES, CollectiveBroadcaster, CollectiveReducer
from zeroshard_comm.errors import DifferentCallsError, DisagreementError, PeerLostError, peer_lost
from zeroshard_comm.interfaces import BucketReduceWork, GradientReducer, ParameterBroadcaster, Segment
from zeroshard_comm.message_exchange import MessageBroadcaster, MessageReducer, MessageReduceWork
from zeroshard_comm.messages import PACK_BELOW, Message, receive, send
from zeroshard_comm.owner_major import row_length
from zeroshard_comm.process_group import GroupContext, RankGroup
from zeroshard_comm.same_host import WORTH_READING
from zeroshard_comm.sharding_config import ShardingConfig, explain_configs
from zeroshard_comm.traffic import KINDS, Traffic, Volume
from zeroshard_comm.transport import Transport, choose_broadcaster, choose_private_group, choose_transport
from zeroshard_comm.values import CHUNK_BYTES, Manifest, all_gather_text, gather, receive_values, send_values

__all__ = [
    "CHUNK_BYTES",
    "KINDS",
    "PACK_BELOW",
    "STAGING_BYTES",
    "WORTH_READING",
    "BucketReduceWork",
    "CollectiveBroadcaster",
    "CollectiveReducer",
    "Coordinator",
    "DifferentCallsError",
    "DisagreementError",
    "GradientReducer",
    "GroupContext",
    "Manifest",
    "Message",
    "MessageBroadcaster",
    "MessageReduceWork",
    "MessageReducer",
    "ParameterBroadcaster",
    "PeerLostError",
    "Position",
    "RankGroup",
    "Segment",
    "ShardingConfig",
    "Traffic",
    "Transport",
    "Volume",
    "agree",
    "agreed",
    "all_gather_text",
    "check_config",
    "choose_broadcaster",
    "choose_private_group",
    "choose_transport",
    "explain_configs",
    "gather",
    "peer_lost",
    "receive",
    "receive_values",
    "row_length",
    "send",
    "send_values",
]

__version__ = "0.1.0"
