//! Lets the agent of a node copy a snapshot from the agent of another node, also the one that is taken for
//! a clone.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use prost::Message;
use tonic::{Code, Status};

use super::snapshot_for_clone::ForClone;
use crate::agent::find_request::Kind as Found;
use crate::agent::look_for_move_response::State;
use crate::agent::receive_request::{Problem, Purpose, Source};
use crate::agent::{FindRequest, LookForMoveRequest, OfferRequest, ReceiveRequest, SnapshotOffer};
use crate::csi::{CreateVolumeRequest, CreateVolumeResponse};
use crate::error::{Error, Kind, Result, chain};
use crate::fault;
use crate::operation::{ContentSource, CreateVolume};
use crate::router::Router;
use crate::router::agents::Agent;
use crate::router::call::Call;
use crate::router::cluster::{ObjectRef, Unwanted};
use crate::router::resolve::answered;
use crate::service::status;

/// The reason of events about a running copy.
const PROGRESS: &str = "CopyProgress";
/// How often the cluster is asked whether a running copy is still wanted.
const UNWANTED_POLL_INTERVAL: Duration = Duration::from_secs(5);

/// How an agent creates a volume.
pub(super) enum Make {
    /// From nothing, or from a source of its own.
    Here,
    /// From a snapshot or a volume of another node.
    From {
        /// Its agent, or why it cannot be asked.
        source: Result<Arc<Agent>>,
        what: Sent,
    },
}

/// What is sent to another node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::router) enum Sent {
    /// The snapshot with this ID.
    Snapshot(String),
    /// A volume, of which a hidden snapshot is taken.
    Volume(ForClone),
}

impl Sent {
    pub(super) fn of(source: &ContentSource, clone: &str) -> Result<Sent> {
        match source {
            ContentSource::Snapshot(id) => Ok(Sent::Snapshot(id.clone())),
            ContentSource::Volume(id) => {
                let volume = id.parse();
                Ok(Sent::Volume(ForClone {
                    volume: volume.map_err(|_| Error::not_found(Kind::Volume, id.as_str()))?,
                    clone: clone.to_string(),
                }))
            }
        }
    }

    /// The ID of the snapshot, whether or not it was taken.
    fn snapshot_id(&self) -> String {
        match self {
            Sent::Snapshot(id) => id.clone(),
            Sent::Volume(it) => it.snapshot_id(),
        }
    }
}

/// What an agent fills a volume from.
pub(in crate::router) struct ReceiveFrom<'a> {
    /// The agent of the source, or why it cannot be asked.
    pub(in crate::router) source: &'a Result<Arc<Agent>>,
    pub(in crate::router) what: Sent,
    /// Snapshots of the same volume, of which the volume may have the content.
    pub(in crate::router) bases: Vec<String>,
    pub(in crate::router) purpose: Purpose,
}

/// A snapshot that an agent offers, and where it can be read.
struct Offered {
    node: String,
    address: String,
    offer: SnapshotOffer,
}

/// A snapshot that is copied from one node to another: the offer of its agent, or the error.
type Granted = std::result::Result<Offered, (String, Problem)>;

impl Router {
    /// Lets the source offer a snapshot to the agent of another node.
    async fn offered(&self, call: &Call<'_>, from: &ReceiveFrom<'_>, reader: &Agent) -> Granted {
        let problem = |node: &str, error: &Error| {
            let status = status(call.rpc(), error);
            let problem = Problem {
                code: status.code() as i32,
                message: status.message().to_string(),
            };
            (node.to_string(), problem)
        };
        let source = from.source.as_ref();
        let source = source.map_err(|error| problem("", error))?;
        let offered = async {
            if let Sent::Volume(it) = &from.what {
                self.take_for_clone(call, source, it).await?;
                fault::reach("router", "snapshot-taken");
            }
            let mut client = source.client().await?;
            let request = call.request(OfferRequest {
                snapshot_id: from.what.snapshot_id(),
                reader_node: reader.node().to_string(),
                base_snapshot_ids: from.bases.clone(),
            })?;
            let answer = client.offer(request).await;
            let answer = answer.map_err(|status| match status.code() {
                Code::Unimplemented => source.unreachable("its release cannot send snapshots"),
                _ => source.error(&status),
            })?;
            let offer = answer.into_inner().offer;
            let offer = offer.ok_or_else(|| self.refuse(source, "it offers no snapshot"))?;
            let address = peer_address(source)?;
            fault::reach("router", "offered");
            Ok(Offered {
                node: source.node().to_string(),
                address,
                offer,
            })
        };
        let offered: Result<Offered> = offered.await;
        offered.map_err(|error| problem(source.node(), &error))
    }

    /// Lets an agent create a volume from a source of another node. The snapshot that was taken for a
    /// clone is deleted once no repeat of the call needs it.
    pub(super) async fn receive_from(
        &self,
        call: &Call<'_>,
        agent: &Arc<Agent>,
        (message, asked): (&CreateVolumeRequest, &CreateVolume),
        (source, what): (&Result<Arc<Agent>>, &Sent),
    ) -> Result<CreateVolumeResponse> {
        // No snapshot is taken for a clone that is complete, or that has no room.
        let needless = match what {
            Sent::Snapshot(_) => None,
            Sent::Volume(_) => match self.look(call, agent, asked).await {
                Ok(Some(State::Ready)) => Some(Error::pending(format!("volume {}", asked.name))),
                Ok(Some(_)) => None,
                Ok(None) => self.must_have_room_for(agent, asked).err(),
                // The call joins the copy that runs.
                Err(error) if status(call.rpc(), &error).code() == Code::Aborted => None,
                Err(error) => return Err(error),
            },
        };
        fault::reach("router", "looked");
        let refused = needless.map(Err);
        let source = refused.as_ref().unwrap_or(source);
        let received = self
            .receive_wanted(call, agent, (message, asked), (source, what))
            .await;
        fault::reach("router", "received");
        if let Sent::Volume(it) = what
            && received.as_ref().err().is_none_or(Error::is_final)
        {
            self.end_for_clone(it).await;
            fault::reach("router", "snapshot-deleted");
        }
        received
    }

    /// The state of a new volume on an agent; `None` if nothing of it exists there.
    async fn look(
        &self,
        call: &Call<'_>,
        agent: &Arc<Agent>,
        asked: &CreateVolume,
    ) -> Result<Option<State>> {
        let question = FindRequest {
            kind: Found::Volume.into(),
            name: asked.name.clone(),
            pool: asked.parameters.pool.clone().unwrap_or_default(),
        };
        let Some(id) = self.find(call, Arc::clone(agent), question).await? else {
            return Ok(None);
        };
        let request = call.request(LookForMoveRequest {
            volume_id: id.to_string(),
            snapshot_ids: Vec::new(),
        })?;
        let mut client = agent.client().await?;
        let seen = answered(agent, client.look_for_move(request)).await?;
        Ok(Some(seen.state()))
    }

    /// Lets an agent create a volume from a snapshot of another node, as long as it is wanted there.
    /// After that, what was copied is deleted durably before the answer.
    async fn receive_wanted(
        &self,
        call: &Call<'_>,
        agent: &Agent,
        (message, asked): (&CreateVolumeRequest, &CreateVolume),
        (source, what): (&Result<Arc<Agent>>, &Sent),
    ) -> Result<CreateVolumeResponse> {
        let from = ReceiveFrom {
            source,
            what: what.clone(),
            bases: Vec::new(),
            purpose: Purpose::Restore,
        };
        let claim = asked.parameters.claim.as_deref();
        let find_unwanted = || self.cluster.find_unwanted(agent.node(), claim);
        let ended = async {
            loop {
                tokio::time::sleep(UNWANTED_POLL_INTERVAL).await;
                if let Some(why) = find_unwanted().await {
                    return why;
                }
                self.tell_progress(agent, asked);
            }
        };
        let why = match find_unwanted().await {
            Some(why) => why,
            None => tokio::select! {
                received = self.receive(call, agent, message, &from) => return received,
                why = ended => why,
            },
        };
        let node = agent.node();
        tracing::info!(
            volume = asked.name,
            node,
            ?why,
            "ending a copy that is not wanted any more"
        );
        self.end_copy(call, agent, (message, what), why).await
    }

    /// Records an event about a copy, as its agent has reported it last. The messages of a copy are
    /// ten, and equal ones are one event with a count.
    fn tell_progress(&self, agent: &Agent, asked: &CreateVolume) {
        let seen = agent.seen();
        let mut copies = seen.description.iter().flat_map(|seen| &seen.copies);
        let running = copies.find(|copy| copy.volume_name == asked.name);
        let Some((claim, copy)) = asked.parameters.claim.as_ref().zip(running) else {
            return;
        };
        let gib = |bytes: u64| bytes as f64 / (1_u64 << 30) as f64;
        let tenths = u128::from(copy.copied_bytes) * 10 / u128::from(copy.total_bytes.max(1));
        let message = format!(
            "at least {} % of {:.1} GiB are copied to node {}",
            tenths.min(10) * 10,
            gib(copy.total_bytes),
            agent.node()
        );
        let about = ObjectRef::Claim(claim.clone());
        self.cluster.record_event(&about, false, PROGRESS, message);
    }

    /// Lets an agent delete durably what it has copied into a volume, and returns the error for the
    /// caller. A volume that is complete is returned.
    pub(super) async fn end_copy(
        &self,
        call: &Call<'_>,
        agent: &Agent,
        (message, what): (&CreateVolumeRequest, &Sent),
        why: Unwanted,
    ) -> Result<CreateVolumeResponse> {
        let (code, reason) = match why {
            Unwanted::Node(why) => (Code::ResourceExhausted, why),
            Unwanted::Claim(why) => (Code::FailedPrecondition, why),
        };
        let problem = Source::Problem(Problem {
            code: code as i32,
            message: reason,
        });
        let request = ReceiveRequest {
            create: message.encode_to_vec(),
            source: Some(problem),
            snapshot_id: what.snapshot_id(),
            ..ReceiveRequest::default()
        };
        self.ask_to_receive(call, agent, request).await
    }

    /// Lets an agent fill a volume. It reads a volume that moves back before the volume is complete.
    pub(in crate::router) async fn receive(
        &self,
        call: &Call<'_>,
        agent: &Agent,
        message: &CreateVolumeRequest,
        from: &ReceiveFrom<'_>,
    ) -> Result<CreateVolumeResponse> {
        let (source_node, source_address, source) = match self.offered(call, from, agent).await {
            Ok(sent) => (sent.node, sent.address, Source::Offer(sent.offer)),
            Err((node, problem)) => (node, String::new(), Source::Problem(problem)),
        };
        let request = ReceiveRequest {
            create: message.encode_to_vec(),
            source_node,
            source_address,
            source: Some(source),
            verify: from.purpose == Purpose::Move,
            purpose: from.purpose.into(),
            snapshot_id: from.what.snapshot_id(),
        };
        self.ask_to_receive(call, agent, request).await
    }

    async fn ask_to_receive(
        &self,
        call: &Call<'_>,
        agent: &Agent,
        request: ReceiveRequest,
    ) -> Result<CreateVolumeResponse> {
        let request = call.request(request)?;
        let mut client = agent.client().await?;
        let question = async {
            client
                .receive(request)
                .await
                .map_err(|status| match status.code() {
                    Code::Unimplemented => {
                        Status::unavailable("its release cannot receive snapshots")
                    }
                    _ => status,
                })
        };
        let answer = call.ask(agent, question).await?.into_inner();
        let created = CreateVolumeResponse::decode(&*answer.created);
        created.map_err(|error| self.refuse(agent, &format!("its volume is invalid: {error}")))
    }
}

/// The address at which an agent sends snapshots.
pub(in crate::router) fn peer_address(agent: &Agent) -> Result<String> {
    let seen = agent.seen();
    let port = seen.description.map_or(0, |seen| seen.peer_port);
    let address = agent.address().parse::<SocketAddr>();
    match (address, u16::try_from(port)) {
        (Ok(mut address), Ok(port)) if port != 0 => {
            address.set_port(port);
            Ok(address.to_string())
        }
        (Err(error), _) => Err(agent.unreachable(&chain(&error))),
        _ => Err(agent.unreachable("it does not send snapshots; set --peer-listen")),
    }
}
