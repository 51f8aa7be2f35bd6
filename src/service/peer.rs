//! Snapshots between agents: an agent sends one to the agent that the router has granted it to, and
//! fills a volume from one that another agent sends.

mod client;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use prost::Message;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::BoxStream;
use tonic::transport::Channel;
use tonic::{Code, Extensions, Request, Status};

use super::{Rpc, RpcResult, Service, answer, log_and_unwrap, max_wait, reply, request, status};
use crate::agent::peer_server::Peer;
use crate::agent::read_response::{Part, Piece};
use crate::agent::receive_request::{self, Problem, Source};
use crate::agent::{
    OfferRequest, OfferResponse, ReadRequest, ReadResponse, ReceiveRequest, ReceiveResponse,
    SnapshotForCloneRequest, SnapshotForCloneResponse, SnapshotOffer,
};
use crate::csi;
use crate::error::{Error, Result};
use crate::operation::{
    Checksum, Driver, Key, Offer, OutgoingRead, Purpose, RemoteSnapshot, SnapshotRange, Ticket,
    Wanted, WorkClass, request_for_clone,
};
use client::PeerSource;

/// Number of messages that may wait for the reader; each has at most 4 MiB of data.
const MAX_QUEUED_MESSAGES: usize = 2;
/// How long a reader may take to accept a message. A reader that hangs would prevent the deletion of
/// the snapshot.
const SEND_TIMEOUT: Duration = Duration::from_secs(60);
/// A message has 4 MiB of data, and an offset and a length for each piece of it.
const MESSAGE_BYTES: usize = 8 << 20;

/// Connects to the agents of other nodes.
#[tonic::async_trait]
pub trait PeerDial: Send + Sync + 'static {
    /// A channel to the agent of a node, which must prove the name of its node.
    async fn dial(&self, node: &str, address: &str) -> Result<Channel>;
}

/// The names that callers have proven.
pub trait Callers: Send + Sync + 'static {
    /// Whether a caller is the agent of a node.
    fn is_agent_of(&self, caller: &Extensions, node: &str) -> bool;
}

/// How an agent exchanges snapshots with others.
#[derive(Clone)]
pub struct Peers {
    /// Connects to agents from which snapshots are received.
    pub dial: Arc<dyn PeerDial>,
    /// The port at which snapshots are sent, if they are.
    pub port: Option<u16>,
}

/// The service Peer of an agent, which is served at an address of its own.
#[derive(Clone)]
pub struct PeerService {
    driver: Arc<Driver>,
    callers: Arc<dyn Callers>,
}

impl PeerService {
    pub fn new(driver: Arc<Driver>, callers: Arc<dyn Callers>) -> PeerService {
        PeerService { driver, callers }
    }
}

#[tonic::async_trait]
impl Peer for PeerService {
    async fn read(&self, request: Request<ReadRequest>) -> RpcResult<BoxStream<ReadResponse>> {
        let (_, caller, message) = request.into_parts();
        let callers = self.callers.clone();
        let open = move |driver: &Driver| {
            let ticket = ticket(&message.ticket)?;
            let wanted = match (message.only_digests, message.base_identity) {
                (true, _) => Wanted::Digests,
                (false, Some(base)) => Wanted::Differences(base),
                (false, None) => Wanted::Data,
            };
            let is_reader = |node: &str| callers.is_agent_of(&caller, node);
            let from = (message.from, wanted);
            driver.snapshots.open_granted(&ticket, &is_reader, from)
        };
        let outgoing = self.driver.run_blocking(open).await;
        let outgoing = outgoing.map_err(|error| status(Rpc::CreateVolume, &error))?;
        let (to, sent) = mpsc::channel(MAX_QUEUED_MESSAGES);
        tokio::spawn(send(self.driver.clone(), outgoing, message.crc32, to));
        answer(Box::pin(ReceiverStream::new(sent)))
    }
}

/// Sends a snapshot to its end, unless its reader disconnects or hangs. A reader of an earlier release
/// does not know CRC-32.
async fn send(
    driver: Arc<Driver>,
    outgoing: OutgoingRead,
    crc32: bool,
    to: mpsc::Sender<std::result::Result<ReadResponse, Status>>,
) {
    let mut rest = Some(outgoing);
    while let Some(mut outgoing) = rest.take() {
        let read = driver.run_blocking(move |driver| {
            let range = driver.snapshots.read_next(&mut outgoing)?;
            Ok((outgoing, range.map(|range| response(range, crc32))))
        });
        let message = match read.await {
            Ok((outgoing, Some(response))) => {
                rest = Some(outgoing);
                Ok(response)
            }
            Ok((_, None)) => return,
            Err(error) => Err(status(Rpc::CreateVolume, &error)),
        };
        let sent = timeout(SEND_TIMEOUT, to.send(message)).await;
        if !matches!(sent, Ok(Ok(()))) {
            return;
        }
    }
}

fn response(range: SnapshotRange, crc32: bool) -> ReadResponse {
    let checksum = range.checksum.unwrap_or_else(|| match crc32 {
        true => Checksum::crc32(&range.changed, &range.pieces),
        false => Checksum::sha256(&range.changed, &range.pieces),
    });
    let (sha256, crc32) = match checksum {
        Checksum::Crc32(crc) => (Vec::new(), Some(crc)),
        Checksum::Sha256(digest) => (digest.to_vec(), None),
    };
    let piece = |piece: crate::operation::Piece| Piece {
        offset: piece.offset,
        data: piece.bytes,
    };
    let part = |range: Range<u64>| Part {
        offset: range.start,
        length: range.end - range.start,
    };
    ReadResponse {
        offset: range.offset,
        length: range.length,
        pieces: range.pieces.into_iter().map(piece).collect(),
        sha256,
        crc32,
        changed: range.changed.into_iter().map(part).collect(),
    }
}

pub(super) fn ticket(bytes: &[u8]) -> Result<Ticket> {
    let ticket = bytes.try_into().map(Ticket);
    ticket.map_err(|_| Error::invalid("ticket", "does not have 32 bytes"))
}

impl Service {
    /// Lets it exchange snapshots with the agents of other nodes.
    #[must_use]
    pub fn with_peers(self, peers: Peers) -> Service {
        Service {
            peers: Some(peers),
            ..self
        }
    }

    /// The port at which it sends snapshots; 0 if it does not.
    pub(super) fn peer_port(&self) -> u32 {
        let port = self.peers.as_ref().and_then(|peers| peers.port);
        port.map_or(0, u32::from)
    }

    pub(super) async fn handle_offer(
        &self,
        asked: OfferRequest,
    ) -> std::result::Result<OfferResponse, Status> {
        let offer = |driver: &Driver, asked: &OfferRequest| {
            let bases = &asked.base_snapshot_ids;
            driver
                .snapshots
                .offer(&asked.snapshot_id, &asked.reader_node, bases)
        };
        let offer = self.run(Rpc::CreateVolume, Ok(asked), offer).await?;
        let formatted = offer.formatted.as_ref().map(serde_json::to_string);
        let formatted = formatted.transpose().map_err(|error| {
            let bug = Error::bug(format!("a format can be written as JSON: {error}"));
            status(Rpc::CreateVolume, &bug)
        })?;
        Ok(OfferResponse {
            offer: Some(SnapshotOffer {
                ticket: offer.ticket.0.to_vec(),
                identity: offer.identity,
                size_bytes: offer.size,
                image_bytes: offer.image_bytes,
                block_size: offer.block_size,
                formatted: formatted.unwrap_or_default(),
                base_identities: offer.bases,
            }),
        })
    }

    pub(super) async fn handle_snapshot_for_clone(
        &self,
        asked: Request<SnapshotForCloneRequest>,
    ) -> std::result::Result<SnapshotForCloneResponse, Status> {
        let max_wait = max_wait(&asked);
        let asked = asked.into_inner();
        let rpc = match asked.delete {
            true => Rpc::DeleteSnapshot,
            false => Rpc::CreateSnapshot,
        };
        let args = for_clone(asked);
        if let Ok(asked) = &args
            && !asked.delete
        {
            let request = request_for_clone(&asked.volume_id, &asked.volume_name);
            let locks = self.driver.snapshots.locks_of_snapshot(&request);
            self.driver.wait_until_free(&locks, max_wait).await;
        }
        let id = self.run(rpc, args, |driver, asked| {
            let (volume, clone) = (&asked.volume_id, &asked.volume_name);
            let snapshots = &driver.snapshots;
            match asked.delete {
                true => snapshots.end_for_clone(volume, clone),
                false => Ok(snapshots.snapshot_for_clone(volume, clone)?.id),
            }
        });
        Ok(SnapshotForCloneResponse {
            snapshot_id: id.await?.to_string(),
        })
    }

    /// Fills a volume. The work continues if the caller disconnects, or its time is over.
    pub(super) async fn handle_receive(
        &self,
        asked: Request<ReceiveRequest>,
    ) -> std::result::Result<ReceiveResponse, Status> {
        const RPC: Rpc = Rpc::CreateVolume;
        let until = Instant::now() + max_wait(&asked);
        let asked = asked.into_inner();
        let decoded = csi::CreateVolumeRequest::decode(&*asked.create);
        let key = self.driver.pools.topology_key();
        let args = decoded
            .map_err(|error| Error::invalid("create", error.to_string()))
            .and_then(|create| {
                let create = log_and_unwrap(Request::new(create));
                request::create_volume(&create, &key)
            });
        let args = args.map_err(|error| status(RPC, &error))?;
        let node = asked.source_node.clone();
        let name = args.name.clone();
        let purpose = purpose(&asked).map_err(|error| status(RPC, &error))?;
        let remote = self.remote(asked, &args, purpose);
        // After a final answer the caller forgets the volume, so no copy goes on.
        if remote.as_ref().is_err_and(Error::is_final) {
            self.driver.snapshots.stop_copy(&name);
        }
        let lock = [Key::Name(name.clone())];
        let left = until.saturating_duration_since(Instant::now());
        self.driver.wait_until_free(&lock, left).await;
        let driver = self.driver.clone();
        let work = driver.run_blocking_in(WorkClass::Long, move |driver| {
            driver.volumes.receive_volume(&args, remote)
        });
        let done = match timeout_at(until, work).await {
            Ok(done) => done,
            Err(_) => Err(Error::pending(format!(
                "the copy of a snapshot of node {node} into volume {name}"
            ))),
        };
        let volume = done.map_err(|error| status(RPC, &error))?;
        super::ids::record_volume_id(&volume.id);
        let created = reply::created(&volume, &key).encode_to_vec();
        let is_incomplete = !volume.is_complete;
        Ok(ReceiveResponse {
            created,
            is_incomplete,
        })
    }

    /// The snapshot that a request names, or why it cannot be read.
    fn remote(
        &self,
        asked: ReceiveRequest,
        args: &crate::operation::CreateVolume,
        purpose: Purpose,
    ) -> Result<RemoteSnapshot> {
        let id = match (asked.snapshot_id, args.content_source.clone()) {
            (id, _) if !id.is_empty() => id,
            (_, Some(crate::operation::ContentSource::Snapshot(id))) => id,
            _ => {
                let problem = "is not a snapshot";
                return Err(Error::invalid("volume_content_source", problem));
            }
        };
        let node = asked.source_node;
        let offer = match asked.source {
            // Not a final error: what was copied before stays.
            Some(Source::Offer(offer)) => parse(offer).map_err(|error| {
                Error::unreachable(format!("the agent of node {node}"), error.to_string())
            })?,
            Some(Source::Problem(problem)) => {
                return Err(cannot_be_read(&node, problem, purpose));
            }
            None => return Err(Error::invalid("offer", "is missing")),
        };
        let Some(peers) = &self.peers else {
            let reason = "it cannot receive snapshots from other nodes";
            return Err(Error::unreachable("the agent of this node", reason));
        };
        let source = PeerSource {
            dial: peers.dial.clone(),
            runtime: tokio::runtime::Handle::current(),
            node,
            address: asked.source_address,
            snapshot_id: id.clone(),
            ticket: offer.ticket,
        };
        Ok(RemoteSnapshot {
            id,
            offer,
            source: Arc::new(source),
            purpose,
            verify: asked.verify,
            is_archived: false,
        })
    }
}

/// Checks a request for the snapshot of a clone.
pub(super) fn for_clone(asked: SnapshotForCloneRequest) -> Result<SnapshotForCloneRequest> {
    request::name(&asked.volume_name)?;
    Ok(asked)
}

pub(super) fn parse(offer: SnapshotOffer) -> Result<Offer> {
    let formatted = match offer.formatted.as_str() {
        "" => None,
        text => {
            let parsed = serde_json::from_str(text);
            Some(parsed.map_err(|error| Error::invalid("offer.formatted", error.to_string()))?)
        }
    };
    if !(512..=4096).contains(&offer.block_size) || !offer.block_size.is_power_of_two() {
        return Err(Error::invalid("offer.block_size", "is not a block size"));
    }
    if offer.image_bytes < offer.size_bytes {
        let problem = "is less than the size of the snapshot";
        return Err(Error::invalid("offer.image_bytes", problem));
    }
    Ok(Offer {
        ticket: ticket(&offer.ticket)?,
        identity: offer.identity,
        bases: offer.base_identities,
        size: offer.size_bytes,
        image_bytes: offer.image_bytes,
        block_size: offer.block_size,
        formatted,
    })
}

pub(super) fn purpose(asked: &ReceiveRequest) -> Result<Purpose> {
    match receive_request::Purpose::try_from(asked.purpose) {
        Ok(receive_request::Purpose::Restore) => Ok(Purpose::Restore),
        Ok(receive_request::Purpose::Fill) => Ok(Purpose::Fill),
        Ok(receive_request::Purpose::Move) => Ok(Purpose::Move),
        Err(_) => Err(Error::invalid("purpose", "is not known to this release")),
    }
}

/// After a final code the caller of a restore forgets the volume, so what was copied must be deleted.
/// What was copied for a move stays until the move deletes it.
pub(super) fn cannot_be_read(node: &str, problem: Problem, purpose: Purpose) -> Error {
    match Code::from_i32(problem.code) {
        _ if purpose != Purpose::Restore => {
            Error::unreachable(format!("the snapshot on node {node}"), problem.message)
        }
        Code::Unavailable
        | Code::Aborted
        | Code::Cancelled
        | Code::DeadlineExceeded
        | Code::Unknown
        | Code::Unimplemented => {
            Error::unreachable(format!("the snapshot on node {node}"), problem.message)
        }
        code => Error::Forwarded {
            code: code as i32,
            message: problem.message,
        },
    }
}
