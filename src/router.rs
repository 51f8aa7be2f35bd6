//! The controller of a cluster: it receives CSI calls and forwards each to the agent of the node
//! that owns the storage.
//!
//! The router owns no storage. It parses an ID, finds the agent that serves its pool, forwards the
//! request, and merges the answers of several agents. An agent that cannot be reached gives
//! UNAVAILABLE with its name, never "not found". Cuts over several volumes are coordinated here
//! ([`crate::cut::coordinator`]), with a stream to each agent as its participant.
//!
//! | module | content |
//! |---|---|
//! | `agents`, `dial` | which agents exist, what each last reported, and the connections to them |
//! | `route` | from an ID to the agent that serves its pool |
//! | `checked` | validation of agents' answers |
//! | `call` | one call: its deadline, and the agents it asks |
//! | `place`, `find` | where a new volume is created, where a name exists |
//! | `restore`, `receive` | on which node a volume with a content source is created, and copies between nodes |
//! | `restore_node` | one node for all claims of a pod, some of which are restored |
//! | `moved`, `moving` | what moves of volumes order of agents |
//! | `attach`, `snapshot` | on which node a volume is, which agent has a snapshot name |
//! | `delete_one` | deletion of a single snapshot, also of a group |
//! | `list`, `lists`, `capacity` | answers merged from all agents |
//! | `group`, `cutting` | groups, and the attempts of a cut over agents |
//! | `remote`, `resolve` | an agent's participation in a cut, and resolving members in doubt |
//! | `controller`, `identity`, `metadata` | the CSI services |
//! | `cluster`, `kube` | the interface to the cluster, and its implementation for Kubernetes |

pub mod agents;
mod attach;
mod call;
mod capacity;
mod checked;
pub mod cluster;
mod controller;
pub mod csi_socket;
mod cut_event;
mod cutting;
mod delete_one;
mod dial;
mod find;
mod for_clone;
mod group;
mod hook_limit;
mod identity;
pub mod kube;
mod list;
mod lists;
mod metadata;
pub mod moved;
mod moving;
mod place;
mod receive;
mod remote;
mod reported;
mod resolve;
mod restore;
pub mod restore_node;
pub mod reverted;
mod reverting;
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
pub use kube::pools::hand_over;
pub use kube::{
    Begun, InCluster, Options as ClusterOptions, StatusSource, adopt, begin, connect, orphans,
    populators,
};
use restore_node::progress::Choices;

/// Configuration of a router besides its agents and its cluster.
#[derive(Clone, Debug)]
pub struct Options {
    /// `--driver-name`: agents of another driver are not used.
    pub driver_name: String,
    /// Alpha features to serve; the agents' own `--alpha` should enable the same.
    pub alpha: Alpha,
    /// Where calls are counted.
    pub metrics: Arc<Metrics>,
}

/// The services Identity, Controller, GroupController and SnapshotMetadata of a whole cluster.
/// Clones share one router.
#[derive(Clone)]
pub struct Router {
    agents: Arc<Agents>,
    cluster: Arc<dyn Cluster>,
    options: Arc<Options>,
    cuts: Arc<cutting::Cuts>,
    choices: Arc<Choices>,
}

/// A weak reference to a router.
struct Weak {
    agents: std::sync::Weak<Agents>,
    cluster: std::sync::Weak<dyn Cluster>,
    options: std::sync::Weak<Options>,
    cuts: std::sync::Weak<cutting::Cuts>,
    choices: std::sync::Weak<Choices>,
}

impl Weak {
    fn upgrade(&self) -> Option<Router> {
        Some(Router {
            agents: self.agents.upgrade()?,
            cluster: self.cluster.upgrade()?,
            options: self.options.upgrade()?,
            cuts: self.cuts.upgrade()?,
            choices: self.choices.upgrade()?,
        })
    }
}

impl Router {
    /// Creates a router of these agents. It keeps no durable state: any number of routers may use
    /// the same agents.
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
            choices: Arc::default(),
        };
        // Without a runtime no agent can be called at all.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(reported::resolve_periodically(router.downgrade()));
        }
        router
    }

    fn downgrade(&self) -> Weak {
        Weak {
            agents: Arc::downgrade(&self.agents),
            cluster: Arc::downgrade(&self.cluster),
            options: Arc::downgrade(&self.options),
            cuts: Arc::downgrade(&self.cuts),
            choices: Arc::downgrade(&self.choices),
        }
    }

    /// The agents that it uses.
    pub fn agents(&self) -> &Arc<Agents> {
        &self.agents
    }

    /// The cluster in which it runs.
    pub fn cluster(&self) -> &Arc<dyn Cluster> {
        &self.cluster
    }

    /// The topology key of the driver.
    pub fn topology_key(&self) -> String {
        format!("topology.{}/home", self.options.driver_name)
    }
}
