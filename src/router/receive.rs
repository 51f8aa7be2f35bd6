//! Lets the agent of a node copy a snapshot from the agent of another node.

use std::net::SocketAddr;
use std::sync::Arc;

use prost::Message;
use tonic::{Code, Status};

use super::Router;
use super::agents::Agent;
use super::call::Call;
use crate::agent::receive_request::{Problem, Purpose, Source};
use crate::agent::{OfferRequest, ReceiveRequest, SnapshotOffer};
use crate::csi::{CreateVolumeRequest, CreateVolumeResponse};
use crate::error::{Error, Result, chain};
use crate::service::status;

/// How an agent creates a volume.
pub(super) enum Make {
    /// From nothing, or from a source of its own.
    Here,
    /// From a snapshot of another node.
    From {
        /// Its agent, or why it cannot be asked.
        source: Result<Arc<Agent>>,
        snapshot_id: String,
    },
}

/// A snapshot that an agent offers, and where it can be read.
struct Offered {
    node: String,
    address: String,
    offer: SnapshotOffer,
}

/// A snapshot that is copied from one node to another: the offer of its agent, or the error.
type Sent = std::result::Result<Offered, (String, Problem)>;

impl Router {
    /// Lets the source offer a snapshot to the agent of another node.
    async fn offered(
        &self,
        call: &Call<'_>,
        (source, snapshot_id): (&Result<Arc<Agent>>, &str),
        reader: &Agent,
    ) -> Sent {
        let problem = |node: &str, error: &Error| {
            let status = status(call.rpc(), error);
            let problem = Problem {
                code: status.code() as i32,
                message: status.message().to_string(),
            };
            (node.to_string(), problem)
        };
        let source = source.as_ref().map_err(|error| problem("", error))?;
        let offered = async {
            let mut client = source.client().await?;
            let request = call.request(OfferRequest {
                snapshot_id: snapshot_id.to_string(),
                reader_node: reader.node().to_string(),
                base_snapshot_ids: Vec::new(),
            })?;
            let answer = client.offer(request).await;
            let answer = answer.map_err(|status| match status.code() {
                Code::Unimplemented => source.unreachable("its release cannot send snapshots"),
                _ => source.error(&status),
            })?;
            let offer = answer.into_inner().offer;
            let offer = offer.ok_or_else(|| self.refuse(source, "it offers no snapshot"))?;
            let address = peer_address(source)?;
            Ok(Offered {
                node: source.node().to_string(),
                address,
                offer,
            })
        };
        let offered: Result<Offered> = offered.await;
        offered.map_err(|error| problem(source.node(), &error))
    }

    /// Lets an agent create a volume from a snapshot of another node.
    pub(super) async fn receive(
        &self,
        call: &Call<'_>,
        agent: &Agent,
        message: &CreateVolumeRequest,
        (source, snapshot_id): (&Result<Arc<Agent>>, &str),
    ) -> Result<CreateVolumeResponse> {
        let (source_node, source_address, source) =
            match self.offered(call, (source, snapshot_id), agent).await {
                Ok(sent) => (sent.node, sent.address, Source::Offer(sent.offer)),
                Err((node, problem)) => (node, String::new(), Source::Problem(problem)),
            };
        let request = call.request(ReceiveRequest {
            create: message.encode_to_vec(),
            source_node,
            source_address,
            verify: false,
            source: Some(source),
            purpose: Purpose::Restore.into(),
            snapshot_id: String::new(),
        })?;
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
fn peer_address(agent: &Agent) -> Result<String> {
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
