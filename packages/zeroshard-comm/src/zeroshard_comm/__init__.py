"""Moving shards between ranks: exchanges, agreement, state transfer, rank arithmetic and traffic counters."""

from zeroshard_comm.agreement import Control, Position
from zeroshard_comm.choice import choose_exchange, choose_own_exchange
from zeroshard_comm.collective import CollectiveExchange
from zeroshard_comm.collective_reduction import CollectiveReduction, CollectiveUnderway
from zeroshard_comm.errors import DisagreementError, PeerLostError
from zeroshard_comm.exchange import Exchange, Pending, Segment, Share, shared_bytes
from zeroshard_comm.noticeboard import Noticeboard
from zeroshard_comm.packing import PACK_BELOW, STATUS_WORDS, PackedShare, Shipment, Status
from zeroshard_comm.point_to_point import GlooExchange, PointToPointExchange
from zeroshard_comm.process_group import GroupContext, RankGroup
from zeroshard_comm.reduction import NOTE_WORDS, Note, Reduction, Underway, window_bytes
from zeroshard_comm.scratch import Receive, ReceiveWindow
from zeroshard_comm.sharding_config import ShardingConfig, agree, check_config, explain_configs
from zeroshard_comm.traffic import Traffic, Volume
from zeroshard_comm.transfer import CHUNK_BYTES, Consignment, gather
from zeroshard_comm.wire import Message, Wire, connect, wire_of
from zeroshard_comm.words import TAG_STATUSES, Words

__all__ = [
    "CHUNK_BYTES",
    "NOTE_WORDS",
    "PACK_BELOW",
    "STATUS_WORDS",
    "TAG_STATUSES",
    "CollectiveExchange",
    "CollectiveReduction",
    "CollectiveUnderway",
    "Consignment",
    "Control",
    "DisagreementError",
    "Exchange",
    "GlooExchange",
    "GroupContext",
    "Message",
    "Note",
    "Noticeboard",
    "PackedShare",
    "PeerLostError",
    "Pending",
    "PointToPointExchange",
    "Position",
    "RankGroup",
    "Receive",
    "ReceiveWindow",
    "Reduction",
    "Segment",
    "ShardingConfig",
    "Share",
    "Shipment",
    "Status",
    "Traffic",
    "Underway",
    "Volume",
    "Wire",
    "Words",
    "agree",
    "check_config",
    "choose_exchange",
    "choose_own_exchange",
    "connect",
    "explain_configs",
    "gather",
    "shared_bytes",
    "window_bytes",
    "wire_of",
]
