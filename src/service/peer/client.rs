//! The reader's end of a stream.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::timeout;
use tonic::{Code, Status, Streaming};

use super::{MESSAGE_BYTES, PeerDial};
use crate::agent::peer_client::PeerClient;
use crate::agent::{ReadRequest, ReadResponse};
use crate::error::{Error, Kind, Result, chain};
use crate::operation::{Checksum, Piece, Ranges, SnapshotRange, SnapshotSource, Ticket, Wanted};

/// How long the source may take for the next message. Its rate is limited, so a message may take
/// seconds.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(60);

/// The agent that has the snapshot.
pub(super) struct PeerSource {
    pub(super) dial: Arc<dyn PeerDial>,
    /// Runs the connection; its calls come from threads that may block.
    pub(super) runtime: Handle,
    pub(super) node: String,
    pub(super) address: String,
    pub(super) snapshot_id: String,
    pub(super) ticket: Ticket,
}

struct Stream {
    runtime: Handle,
    messages: Streaming<ReadResponse>,
    only_digests: bool,
    failure: Failure,
}

/// Describes failures of the connection and of the source.
#[derive(Clone)]
struct Failure {
    node: String,
    snapshot_id: String,
}

impl Failure {
    fn unreachable(&self, reason: String) -> Error {
        Error::unreachable(format!("the agent of node {}", self.node), reason)
    }

    fn late(&self) -> Error {
        let seconds = MESSAGE_TIMEOUT.as_secs();
        self.unreachable(format!("it sent nothing for {seconds} s"))
    }

    /// Only the source itself may report NOT_FOUND, because it is final.
    fn of(&self, status: &Status) -> Error {
        let from_connection = std::error::Error::source(status).is_some();
        match status.code() {
            Code::NotFound if !from_connection => {
                Error::not_found(Kind::Snapshot, &self.snapshot_id)
            }
            _ => self.unreachable(chain(status)),
        }
    }
}

impl SnapshotSource for PeerSource {
    fn node(&self) -> &str {
        &self.node
    }

    fn read(&self, from: u64, wanted: Wanted) -> Result<Box<dyn Ranges>> {
        let failure = Failure {
            node: self.node.clone(),
            snapshot_id: self.snapshot_id.clone(),
        };
        let request = ReadRequest {
            ticket: self.ticket.0.to_vec(),
            from,
            only_digests: wanted == Wanted::Digests,
            crc32: true,
            base_identity: match wanted {
                Wanted::Differences(base) => Some(base),
                Wanted::Data | Wanted::Digests => None,
            },
        };
        let open = async {
            let channel = self.dial.dial(&self.node, &self.address).await?;
            let client = PeerClient::new(channel);
            let mut client = client.max_decoding_message_size(MESSAGE_BYTES);
            let answer = client.read(request).await;
            answer.map_err(|status| failure.of(&status))
        };
        let opened = self.runtime.block_on(timeout(MESSAGE_TIMEOUT, open));
        let answer = opened.map_err(|_| failure.late())??;
        Ok(Box::new(Stream {
            runtime: self.runtime.clone(),
            messages: answer.into_inner(),
            only_digests: wanted == Wanted::Digests,
            failure,
        }))
    }
}

impl Ranges for Stream {
    fn next(&mut self) -> Result<Option<SnapshotRange>> {
        let next = timeout(MESSAGE_TIMEOUT, self.messages.message());
        let next = self.runtime.block_on(next);
        let message = match next {
            Ok(Ok(Some(message))) => message,
            Ok(Ok(None)) => return Ok(None),
            Ok(Err(status)) => return Err(self.failure.of(&status)),
            Err(_) => return Err(self.failure.late()),
        };
        let digest = message.sha256.as_slice().try_into();
        let checksum = match (message.crc32, digest) {
            // A copy that is read back is compared with SHA-256.
            (Some(crc), _) if !self.only_digests => Checksum::Crc32(crc),
            (None, Ok(digest)) => Checksum::Sha256(digest),
            _ => {
                let why = "it sent no checksum that can be used".to_string();
                return Err(self.failure.unreachable(why));
            }
        };
        let pieces = message.pieces.into_iter().map(|piece| Piece {
            offset: piece.offset,
            bytes: piece.data,
        });
        let changed = message.changed.into_iter();
        let changed = changed.map(|part| part.offset..part.offset.saturating_add(part.length));
        Ok(Some(SnapshotRange {
            changed: changed.collect(),
            offset: message.offset,
            length: message.length,
            pieces: pieces.collect(),
            checksum: Some(checksum),
        }))
    }
}
