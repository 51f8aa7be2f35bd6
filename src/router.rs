//! The edge of a cluster: CSI in, CSI out to the agent of the node that owns the storage.
//!
//! The router owns nothing. It parses an id, finds the agent that serves its pool, passes the
//! request on, and merges what several have to say. An agent that can't be reached is
//! UNAVAILABLE by its name, never "not found". Cuts over several volumes are coordinated here
//! ([`crate::cut::coordinator`]), with a stream to each agent as its participant.
//!
//! | room | what |
//! |---|---|
//! | `agents`, `dial` | who the agents are, what each said last, and how it's asked and reached |
//! | `route` | from an id to the agent that serves its pool |
//! | `checked` | what an agent's answers may say |
//! | `call` | one call: its deadline, and whom it asks |
//! | `place`, `find` | where a new volume goes, where a name is |
//! | `attach`, `snapshot` | whose node it is, whose name |
//! | `delete_one` | a single snapshot, also of a group |
//! | `list`, `lists`, `capacity` | what is put together of the answers of all |
//! | `group`, `cutting` | groups, and the tries of a cut over agents |
//! | `remote`, `settle` | an agent's share in it, and the end of doubt about it |
//! | `controller`, `identity`, `metadata` | the services |
//! | `cluster`, `kube` | what is asked of the cluster around, as a seam; and that cluster |

pub mod agents;
mod attach;
mod call;
mod capacity;
mod checked;
pub mod cluster;
mod controller;
mod cutting;
mod delete_one;
mod dial;
mod find;
mod group;
mod held;
mod identity;
pub mod kube;
mod list;
mod lists;
mod metadata;
mod place;
mod remote;
mod resolve;
mod route;
mod snapshot;
#[cfg(test)]
mod tests;
mod view;

use std::sync::Arc;

use crate::model::Alpha;
use crate::telemetry::Metrics;
pub use agents::{Agent, Agents, Dial};
pub use cluster::{Cluster, NoCluster};
pub use dial::TlsDial;
pub use kube::certificates::enrol::Enrolment;
pub use kube::{
    Begun, InCluster, Options as ClusterOptions, adopt, begin, behind, connect, hand_over, orphans,
    unowned,
};

/// What a router needs beside agents and a cluster.
#[derive(Clone, Debug)]
pub struct Options {
    /// `--driver-name`: an agent of another driver is not asked.
    pub driver_name: String,
    /// Alpha parts to serve; the agents' own `--alpha` should have the same.
    pub alpha: Alpha,
    /// Where calls are counted.
    pub metrics: Arc<Metrics>,
}

/// The services Identity, Controller, GroupController and SnapshotMetadata of a whole cluster.
/// Clones are one router.
#[derive(Clone)]
pub struct Router {
    agents: Arc<Agents>,
    cluster: Arc<dyn Cluster>,
    options: Arc<Options>,
    cuts: Arc<cutting::Cuts>,
}

/// A router, as long as others want it.
struct Weak {
    agents: std::sync::Weak<Agents>,
    cluster: std::sync::Weak<dyn Cluster>,
    options: std::sync::Weak<Options>,
    cuts: std::sync::Weak<cutting::Cuts>,
}

impl Weak {
    fn upgrade(&self) -> Option<Router> {
        Some(Router {
            agents: self.agents.upgrade()?,
            cluster: self.cluster.upgrade()?,
            options: self.options.upgrade()?,
            cuts: self.cuts.upgrade()?,
        })
    }
}

impl Router {
    /// Of these agents. It keeps nothing: any number of routers may serve the same agents.
    pub fn new(agents: Arc<Agents>, cluster: Arc<dyn Cluster>, options: Options) -> Router {
        let cuts = Arc::<cutting::Cuts>::default();
        let view = view::View {
            agents: agents.clone(),
            cluster: cluster.clone(),
            cuts: cuts.clone(),
        };
        options.metrics.router().observe(Arc::new(view));
        let router = Router {
            agents,
            cluster,
            options: Arc::new(options),
            cuts,
        };
        // Without a runtime nobody can be asked at all.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(resolve::resolve_periodically(router.downgrade()));
        }
        router
    }

    fn downgrade(&self) -> Weak {
        Weak {
            agents: Arc::downgrade(&self.agents),
            cluster: Arc::downgrade(&self.cluster),
            options: Arc::downgrade(&self.options),
            cuts: Arc::downgrade(&self.cuts),
        }
    }

    /// Whom it asks.
    pub fn agents(&self) -> &Arc<Agents> {
        &self.agents
    }

    /// The cluster around.
    pub fn cluster(&self) -> &Arc<dyn Cluster> {
        &self.cluster
    }

    /// The one topology key.
    pub fn topology_key(&self) -> String {
        format!("topology.{}/home", self.options.driver_name)
    }
}
