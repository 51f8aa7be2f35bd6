//! CreateVolume: chooses the node of a new volume, and copies a snapshot there if the volume is restored
//! or cloned.
//!
//! | file | content |
//! |---|---|
//! | `placement` | the node of a volume without a content source, and attempts on nodes |
//! | `pod_placement` | one node for all claims of a pod, some of which are restored |
//! | `copy_between_nodes` | an agent copies a snapshot from the agent of another node |
//! | `snapshot_for_clone` | the hidden snapshot that is copied for a clone |

pub(super) mod copy_between_nodes;
mod placement;
pub mod pod_placement;
mod snapshot_for_clone;

use std::sync::Arc;

use super::Router;
use super::agents::Agent;
use super::call::Call;
use super::cluster::ObjectRef;
use super::route::{Owner, absent};
use crate::csi::{CreateVolumeRequest, CreateVolumeResponse};
use crate::error::{Kind, Result};
use crate::model::Restore;
use crate::model::VolumeId;
use crate::operation::{ContentSource, CreateVolume};
use crate::service::request;
use copy_between_nodes::{Make, Sent};
use placement::{homes, must_have_room};
use pod_placement::Place;

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
    if question.restore != Restore::Pod {
        return (Destination::Source, None);
    }
    let Some(first) = homes.first() else {
        return stays("no node is selected");
    };
    let at_source = |home: &String| question.source_home == Some(home.as_str());
    match question.is_selected {
        true if at_source(first) => (Destination::Source, None),
        false if homes.iter().any(at_source) => stays("no node is selected"),
        _ => (Destination::Home(first.clone()), None),
    }
}

impl Router {
    /// CreateVolume.
    pub(super) async fn create_volume(
        &self,
        call: &Call<'_>,
        mut message: CreateVolumeRequest,
    ) -> Result<CreateVolumeResponse> {
        let asked = request::create_volume(&message, &self.topology_key())?;
        // They are for the router. Agents of an earlier release do not know them.
        for parameter in ["restore", "onNodeLost"] {
            message.parameters.remove(parameter);
        }
        match &asked.content_source {
            Some(source) => self.place_from(call, message, &asked, source).await,
            None => self.place(call, message, &asked).await,
        }
    }

    /// Creates a volume that has a content source.
    async fn place_from(
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
        let restore = asked.parameters.restore;
        let owner = self.owner(id).await;
        let owner = owner.and_then(|owner| match owner {
            Owner::Agent(agent) => Ok(agent),
            Owner::Nowhere(why) => Err(absent(call.rpc(), kind, id, why)),
        });
        let what = Sent::of(source, &asked.name)?;
        if restore == Restore::Auto {
            return self
                .place_chosen(call, (owner?, what), &message, asked)
                .await;
        }
        let selected = match restore {
            Restore::Source | Restore::Auto => None,
            Restore::Pod => self.selected(&message).await?,
        };
        let homes = homes(&message, asked, &self.topology_key());
        let source_home = self.home_of(&owner, id);
        let (destination, why) = destination(&Question {
            restore,
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
                let agent = owner?;
                return self.create(call, &agent, message, asked, &Make::Here).await;
            }
            Destination::Home(home) => home,
        };
        // Otherwise a copy that has begun there is deleted first.
        if let Some(node) = &selected
            && self.agents.of_home(&home).is_empty()
        {
            self.must_exist(node).await?;
        }
        let make = Make::From {
            source: owner,
            what,
        };
        self.create_at(call, &message, asked, (&home, &make)).await
    }

    /// Creates a volume that has a content source on the node that all volumes of its pod get.
    async fn place_chosen(
        &self,
        call: &Call<'_>,
        (agent, what): (Arc<Agent>, Sent),
        message: &CreateVolumeRequest,
        asked: &CreateVolume,
    ) -> Result<CreateVolumeResponse> {
        let (node, home) = (agent.node().to_string(), agent.home());
        let source_place = Place { node, home };
        let homes = homes(message, asked, &self.topology_key());
        let node = self.selected(message).await?;
        let choice = match node.zip(homes.into_iter().next()) {
            Some((node, home)) => {
                let selected = Place { node, home };
                self.choose(call, asked, Some(&source_place), &selected)
                    .await?
            }
            None => self.choose_source(call, asked, &source_place).await?,
        };
        must_have_room(&choice)?;
        if choice.place == source_place {
            let message = message.clone();
            return self.create(call, &agent, message, asked, &Make::Here).await;
        }
        let make = Make::From {
            source: Ok(agent),
            what,
        };
        let at = (choice.place.home.as_str(), &make);
        self.create_at(call, message, asked, at).await
    }

    /// The topology segment of a source, also while its agent cannot be reached.
    fn home_of(&self, owner: &Result<Arc<Agent>>, id: &str) -> Option<String> {
        if let Ok(agent) = owner {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_created_where_the_pod_is_if_the_class_says_so() {
        let at = |home: &str| Destination::Home(home.into());
        let source = Destination::Source;
        let (own, other) = (["home-a"].as_slice(), ["home-b", "home-a"].as_slice());
        // The class, whether a node is selected, the allowed segments; the destination, and whether an
        // event says why it differs from the class.
        let table = [
            (Restore::Source, true, other, &source, false),
            (
                Restore::Source,
                false,
                ["home-b"].as_slice(),
                &source,
                false,
            ),
            (Restore::Pod, true, other, &at("home-b"), false),
            (Restore::Pod, true, own, &source, false),
            (Restore::Pod, false, other, &source, true),
            (Restore::Pod, false, &[], &source, true),
            (Restore::Pod, false, &["home-b"], &at("home-b"), false),
        ];
        for (n, (restore, is_selected, homes, expected, has_reason)) in
            table.into_iter().enumerate()
        {
            let homes: Vec<String> = homes.iter().map(|home| (*home).to_string()).collect();
            let (destination, why) = destination(&Question {
                restore,
                source_home: Some("home-a"),
                is_selected,
                homes: &homes,
            });
            assert_eq!(
                (&destination, why.is_some()),
                (expected, has_reason),
                "row {n}"
            );
        }
    }
}
