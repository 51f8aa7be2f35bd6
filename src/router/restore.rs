//! Chooses the node of a volume that is restored or cloned, and lets its agent copy a snapshot of
//! another node.

use std::net::SocketAddr;

use prost::Message;
use tonic::Code;

use super::Router;
use super::agents::Agent;
use super::call::Call;
use super::cluster::ObjectRef;
use super::place::{Make, homes};
use super::route::{Owner, absent};
use crate::agent::receive_request::{Problem, Source};
use crate::agent::{OfferRequest, ReceiveRequest, SnapshotOffer};
use crate::csi::{CreateVolumeRequest, CreateVolumeResponse};
use crate::error::{Error, Kind, Result, chain};
use crate::model::Restore;
use crate::model::VolumeId;
use crate::operation::{ContentSource, CreateVolume};
use crate::service::status;

/// Where a volume with a content source is created.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Destination {
    /// Where its source is.
    Source,
    /// In this topology segment.
    Home(String),
}

/// What a choice depends on.
struct Question<'a> {
    restore: Restore,
    source: &'a ContentSource,
    /// The topology segment of the source; `None` if it is not known.
    source_home: Option<&'a str>,
    /// Whether a node is selected for the PVC. Then the first of `homes` is its segment.
    is_selected: bool,
    /// The topology segments that are allowed, in the order of preference; empty means any.
    homes: &'a [String],
}

/// Chooses where a volume is created, with the reason if that is not what its class requests.
fn destination(question: &Question<'_>) -> (Destination, Option<&'static str>) {
    let Question { homes, .. } = question;
    let stays = |why| (Destination::Source, Some(why));
    if question.restore == Restore::Source {
        return (Destination::Source, None);
    }
    let Some(first) = homes.first() else {
        return stays("no node is selected");
    };
    let at_source = |home: &String| question.source_home == Some(home.as_str());
    match (question.is_selected, question.source) {
        (true, _) if at_source(first) => (Destination::Source, None),
        (false, _) if homes.iter().any(at_source) => stays("no node is selected"),
        (_, ContentSource::Volume(_)) => {
            stays("only a snapshot can be restored on another node; a volume is cloned on its own")
        }
        (_, ContentSource::Snapshot(_)) => (Destination::Home(first.clone()), None),
    }
}

/// A snapshot that an agent offers, and where it can be read.
#[derive(Clone)]
pub(super) struct Offered {
    node: String,
    address: String,
    offer: SnapshotOffer,
}

/// A snapshot that is copied from one node to another: the offer of its agent, or the error.
pub(super) type Sent = std::result::Result<Offered, (String, Problem)>;

impl Router {
    /// Creates a volume that has a content source.
    pub(super) async fn place_from(
        &self,
        call: &Call<'_>,
        message: CreateVolumeRequest,
        asked: &CreateVolume,
        source: &ContentSource,
    ) -> Result<CreateVolumeResponse> {
        let (kind, id) = match source {
            ContentSource::Snapshot(id) => (Kind::Snapshot, id),
            ContentSource::Volume(id) => (Kind::Volume, id),
        };
        let owner = self.owner(id).await;
        let selected = match asked.parameters.restore {
            Restore::Source => None,
            Restore::Pod => self.selected(&message).await?,
        };
        let homes = homes(&message, asked, &self.topology_key());
        let source_home = self.home_of(&owner, id);
        let (destination, why) = destination(&Question {
            restore: asked.parameters.restore,
            source,
            source_home: source_home.as_deref(),
            is_selected: selected.is_some(),
            homes: &homes,
        });
        if let Some(why) = why {
            let message = format!("created where {kind} {id} is: {why}");
            self.tell_claim(asked, "RestoredAtSource", message);
        }
        let home = match destination {
            Destination::Source => {
                return match owner? {
                    Owner::Agent(agent) => {
                        self.create(call, &agent, message, asked, &Make::Here).await
                    }
                    Owner::Nowhere(why) => Err(absent(call.rpc(), kind, id, why)),
                };
            }
            Destination::Home(home) => home,
        };
        if let Some(node) = &selected {
            self.must_exist(node).await?;
        }
        let owner = owner.and_then(|owner| match owner {
            Owner::Agent(agent) => Ok(agent),
            Owner::Nowhere(why) => Err(absent(call.rpc(), kind, id, why)),
        });
        let make = Make::From {
            source: owner,
            snapshot_id: id.clone(),
        };
        self.create_at(call, &message, asked, (&home, &make)).await
    }

    /// The topology segment of a source, also while its agent cannot be reached.
    fn home_of(&self, owner: &Result<Owner>, id: &str) -> Option<String> {
        if let Ok(Owner::Agent(agent)) = owner {
            return Some(agent.home());
        }
        let pool = id.parse::<VolumeId>().ok()?.pool;
        self.known(pool).map(|known| known.home)
    }

    /// Records an event on the PVC of a new volume.
    fn tell_claim(&self, asked: &CreateVolume, reason: &'static str, message: String) {
        if let Some(claim) = &asked.parameters.claim {
            let about = ObjectRef::Claim(claim.clone());
            self.cluster.record_event(&about, false, reason, message);
        }
    }

    /// Lets the source offer a snapshot to the agent of another node.
    async fn offered(
        &self,
        call: &Call<'_>,
        (source, snapshot_id): (&Result<std::sync::Arc<Agent>>, &str),
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
        (source, snapshot_id): (&Result<std::sync::Arc<Agent>>, &str),
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
        })?;
        let mut client = agent.client().await?;
        let question = async {
            client
                .receive(request)
                .await
                .map_err(|status| match status.code() {
                    Code::Unimplemented => {
                        tonic::Status::unavailable("its release cannot receive snapshots")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_is_restored_where_the_pod_is_if_the_class_says_so() {
        let snapshot = ContentSource::Snapshot("s".into());
        let volume = ContentSource::Volume("v".into());
        let at = |home: &str| Destination::Home(home.into());
        let source = Destination::Source;
        let (own, other) = (["home-a"].as_slice(), ["home-b", "home-a"].as_slice());
        // The class, the source, whether a node is selected, the allowed segments; the destination,
        // and whether an event says why it differs from the class.
        let table = [
            (Restore::Source, &snapshot, true, other, &source, false),
            (Restore::Source, &volume, false, &["home-b"], &source, false),
            (Restore::Pod, &snapshot, true, other, &at("home-b"), false),
            (Restore::Pod, &snapshot, true, own, &source, false),
            (Restore::Pod, &snapshot, false, other, &source, true),
            (Restore::Pod, &snapshot, false, &[], &source, true),
            (
                Restore::Pod,
                &snapshot,
                false,
                &["home-b"],
                &at("home-b"),
                false,
            ),
            (Restore::Pod, &volume, true, other, &source, true),
            (Restore::Pod, &volume, true, own, &source, false),
        ];
        for (n, (restore, from, is_selected, homes, expected, told)) in
            table.into_iter().enumerate()
        {
            let homes: Vec<String> = homes.iter().map(|home| (*home).to_string()).collect();
            let (destination, why) = destination(&Question {
                restore,
                source: from,
                source_home: Some("home-a"),
                is_selected,
                homes: &homes,
            });
            assert_eq!((&destination, why.is_some()), (expected, told), "row {n}");
        }
    }
}
