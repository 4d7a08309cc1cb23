"""Moving shards between ranks: exchanges, agreement, state transfer, rank arithmetic and traffic counters."""

from zeroshard_comm.agreement import Declaration, agree, agree_over, explain_declarations
from zeroshard_comm.choice import exchange_for, own_exchange_for
from zeroshard_comm.collective import CollectiveExchange
from zeroshard_comm.collective_reduction import CollectiveReduction, CollectiveUnderway
from zeroshard_comm.control import Control
from zeroshard_comm.exchange import Exchange, Pending, Segment, Share, shared_bytes
from zeroshard_comm.failures import DisagreementError, PeerLostError
from zeroshard_comm.noticeboard import Noticeboard
from zeroshard_comm.packing import PACK_BELOW, STATUS_WORDS, PackedShare, Shipment, Status
from zeroshard_comm.point_to_point import GlooExchange, PointToPointExchange
from zeroshard_comm.ranks import RankGroup
from zeroshard_comm.reduction import NOTE_WORDS, Note, Reduction, Underway, window_bytes
from zeroshard_comm.scratch import Receive, ReceiveWindow
from zeroshard_comm.tags import claim_tags
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
    "Declaration",
    "DisagreementError",
    "Exchange",
    "GlooExchange",
    "Message",
    "Note",
    "Noticeboard",
    "PackedShare",
    "PeerLostError",
    "Pending",
    "PointToPointExchange",
    "RankGroup",
    "Receive",
    "ReceiveWindow",
    "Reduction",
    "Segment",
    "Share",
    "Shipment",
    "Status",
    "Traffic",
    "Underway",
    "Volume",
    "Wire",
    "Words",
    "agree",
    "agree_over",
    "claim_tags",
    "connect",
    "exchange_for",
    "explain_declarations",
    "gather",
    "own_exchange_for",
    "shared_bytes",
    "window_bytes",
    "wire_of",
]
