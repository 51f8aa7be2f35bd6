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
//! | `controller`, `group`, `metadata`, `identity` | the CSI services |
//! | `admin` | the service of administrators |
//! | `call` | one call: its deadline, and the agents it asks |
//! | `agents`, `dial` | which agents exist, what each last reported, and the connections to them |
//! | `route`, `find` | from an ID to the agent that serves its pool; where a name exists |
//! | `checked` | validation of agents' answers |
//! | `create_volume` | on which node a new volume is created, and copies between nodes for restores and clones |
//! | `create_snapshot`, `delete_snapshot` | single snapshots, also those of a group |
//! | `attach` | on which node a volume is |
//! | `lists`, `capacity` | answers merged from all agents |
//! | `cuts` | the attempts of a cut over agents, and an agent's participation in it |
//! | `resolve` | members of groups that are in doubt |
//! | `volume_moves`, `volume_reverts` | what VolumeMoves and VolumeReverts order of agents |
//! | `cluster`, `kube` | the interface to the cluster, and its implementation for Kubernetes |
//! | `metrics` | what a router reports in metrics and readiness |
//! | `csi_socket` | a command's connection to the driver at a CSI socket |

mod admin;
pub mod agents;
mod attach;
mod call;
mod capacity;
mod checked;
pub mod cluster;
mod controller;
mod create_snapshot;
pub mod create_volume;
pub mod csi_socket;
mod cuts;
mod delete_snapshot;
mod dial;
mod find;
mod group;
mod identity;
pub mod kube;
mod lists;
mod metadata;
mod metrics;
mod resolve;
mod route;
#[cfg(test)]
mod tests;
pub mod volume_moves;
pub mod volume_reverts;

use std::sync::Arc;

use crate::model::Alpha;
use crate::telemetry::Metrics;
pub use agents::{Agent, Agents, Dial};
pub use cluster::{Cluster, NoCluster};
use create_volume::pod_placement::progress::Choices;
pub use dial::TlsDial;
pub use kube::certificates::enrol::Enrolment;
pub use kube::pools::hand_over;
pub use kube::{
    Begun, InCluster, Options as ClusterOptions, StatusSource, adopt, begin, connect, orphans,
    populators,
};

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
    cuts: Arc<cuts::Cuts>,
    choices: Arc<Choices>,
}

/// A weak reference to a router.
struct Weak {
    agents: std::sync::Weak<Agents>,
    cluster: std::sync::Weak<dyn Cluster>,
    options: std::sync::Weak<Options>,
    cuts: std::sync::Weak<cuts::Cuts>,
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
        let cuts = Arc::<cuts::Cuts>::default();
        let view = metrics::View {
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
            runtime.spawn(resolve::reported::resolve_periodically(router.downgrade()));
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
