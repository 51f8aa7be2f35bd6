//! The settings that each role requires or refuses: from [`Given`] to a [`Config`].

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::time::Duration;

use super::{
    AgentAddress, BadConfig, CopyRate, Endpoint, Given, InlineSize, NODE_RECORD, Role, STATE_DIR,
    ServiceName, WaitTime, allowed_paths, folder, hook,
};
use crate::hook::HookDefinition;
use crate::host::freezer::GracePeriods;
use crate::model::alpha::Alpha;
use crate::model::{PoolDefinition, pool};
use crate::telemetry::LogFormat;
use crate::tls::{Files, Name};

/// The configuration of `serve`.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The CSI socket.
    pub endpoint: Endpoint,
    pub driver_name: String,
    /// The address at which metrics are served, if any.
    pub metrics_address: Option<SocketAddr>,
    pub log_format: LogFormat,
    /// Alpha features of CSI that are enabled.
    pub alpha: Alpha,
    /// The role of this process.
    pub role: RoleConfig,
}

/// The role of this process, with its configuration.
#[derive(Clone, Debug, PartialEq)]
pub enum RoleConfig {
    /// A single node.
    All {
        /// Its storage.
        node: NodeConfig,
        /// The quiesce hooks, with unique names.
        hooks: Vec<HookDefinition>,
    },
    /// A node of a cluster.
    Node {
        /// Its storage.
        node: NodeConfig,
        /// The endpoint for the router.
        agent: AgentConfig,
    },
    /// The controller of a cluster.
    Controller(ControllerConfig),
}

/// A machine with pools.
#[derive(Clone, Debug, PartialEq)]
pub struct NodeConfig {
    /// Name of this node, also its CSI node ID.
    pub name: String,
    /// The pools in the given order; at least one.
    pub pools: Vec<PoolDefinition>,
    /// How a freeze waits for RCU grace periods.
    pub grace_periods: GracePeriods,
    /// Directory of state that must survive the process but not a reboot.
    pub state_dir: PathBuf,
    /// Path of the node's record of its pools.
    pub node_record: PathBuf,
    /// CSI paths must be below one of these directories.
    pub allowed_paths: Vec<PathBuf>,
    /// Maximum size of an inline volume in bytes; without it, none are created.
    pub inline_max_size: Option<u64>,
    /// Maximum number of volumes on the node, as reported to the scheduler.
    pub max_volumes: Option<NonZeroU16>,
    /// Maximum rate of the copies of each pool in bytes per second, unless it is the default.
    pub copy_rate: Option<u64>,
    /// Directories with files whose blocks imported volumes may share.
    pub import_paths: Vec<PathBuf>,
    /// Whether metrics of single volumes are reported.
    pub metrics_per_volume: bool,
}

impl NodeConfig {
    /// Whether the pools are simulated; either all are or none.
    pub fn is_simulated(&self) -> bool {
        self.pools.iter().any(|pool| pool.place.is_memory())
    }
}

/// The endpoint of a node's agent.
#[derive(Clone, Debug, PartialEq)]
pub struct AgentConfig {
    /// The address on which it listens.
    pub listen: SocketAddr,
    /// The address at which it sends snapshots to other agents, if it does.
    pub peer_listen: Option<SocketAddr>,
    /// The name that its certificate must have.
    pub name: Name,
    /// Its certificates.
    pub tls: Files,
}

/// The configuration of a router.
#[derive(Clone, Debug, PartialEq)]
pub struct ControllerConfig {
    /// How it finds agents.
    pub agents: Agents,
    /// Its certificates. `None` is possible only with a Service: then the router issues the
    /// certificates of the cluster itself.
    pub tls: Option<Files>,
    /// How long a pool's Node object and agent must be gone before the pool is marked as lost;
    /// never if `None`.
    pub lost_after: Option<Duration>,
    /// How long the other replicas must have been Ready for a claim of a lost node to be deleted; no
    /// claim is if `None`.
    pub recreate_ready_for: Option<Duration>,
    /// Whether it executes SnapshotSchedules.
    pub snapshot_schedules: bool,
    /// The port of its status page, if it has one.
    pub page_port: Option<NonZeroU16>,
    /// Whether it reports the claim of each volume.
    pub metrics_per_volume: bool,
}

/// How a router finds agents.
#[derive(Clone, Debug, PartialEq)]
pub enum Agents {
    /// At these addresses; at least one, and each node once.
    At(Vec<AgentAddress>),
    /// As the endpoints of a headless Service.
    Of(ServiceName),
}

impl Config {
    /// The storage of this process; a controller has none.
    pub fn node(&self) -> Option<&NodeConfig> {
        match &self.role {
            RoleConfig::All { node, .. } | RoleConfig::Node { node, .. } => Some(node),
            RoleConfig::Controller(_) => None,
        }
    }
}

fn missing(what: &str) -> BadConfig {
    BadConfig(format!("{what} is missing"))
}

/// Flags, each with whether it is given.
type Flags<'a> = &'a [(&'a str, bool)];

impl Given {
    /// Checks the whole configuration.
    pub fn finish(self) -> Result<Config, BadConfig> {
        let role = self.role.unwrap_or(Role::All);
        self.refuse_what_has_no_use(role)?;
        let endpoint = self.endpoint.clone().ok_or_else(|| {
            missing("--endpoint (or CSI_ENDPOINT), such as unix:///run/slackwater/csi/csi.sock,")
        })?;
        Ok(Config {
            endpoint,
            driver_name: self.driver_name.clone().unwrap_or_default().0,
            metrics_address: self.metrics_address.map(|address| address.0),
            log_format: self.log_format.unwrap_or_default(),
            alpha: self.alpha.iter().copied().collect(),
            role: match role {
                Role::All => self.all()?,
                Role::Node => self.node()?,
                Role::Controller => self.controller()?,
            },
        })
    }

    fn refuse_what_has_no_use(&self, role: Role) -> Result<(), BadConfig> {
        let storage = [
            ("--node-name", self.node_name.is_some()),
            ("--pool", !self.pool.is_empty()),
            ("--grace-periods", self.grace_periods.is_some()),
            ("--state-dir", self.state_dir.is_some()),
            ("--node-record", self.node_record.is_some()),
            ("--allowed-path", !self.allowed_path.is_empty()),
            ("--inline-max-size", self.inline_max_size.is_some()),
            ("--max-volumes", self.max_volumes.is_some()),
            ("--copy-rate", self.copy_rate.is_some()),
            ("--import-path", !self.import_path.is_empty()),
        ];
        let hook = [("[[hook]]", !self.hook.is_empty())];
        let listen = [
            ("--agent-listen", self.agent_listen.is_some()),
            ("--peer-listen", self.peer_listen.is_some()),
        ];
        let agents = [
            ("--agent", !self.agent.is_empty()),
            ("--agent-service", self.agent_service.is_some()),
        ];
        let lost = [
            ("--lost-after", self.lost_after.is_some()),
            ("--recreate-ready-for", self.recreate_ready_for.is_some()),
        ];
        let objects = [
            ("--snapshot-schedules", self.snapshot_schedules),
            ("--page-port", self.page_port.is_some()),
        ];
        let tls = self.tls_flags();
        let no_storage = "a controller owns no storage and does not serve the Node service";
        let in_pods = "in a cluster, hooks run in pods and are configured by pod annotations";
        let lists = "only a controller keeps the list of the cluster's pools";
        let talks = "a single node does not communicate over the network";
        // Flags and whether they are given, the roles that use them, and why no others do.
        let uses: [(Flags<'_>, &[Role], &str); 7] = [
            (&storage, &[Role::All, Role::Node], no_storage),
            (&hook, &[Role::All], in_pods),
            (
                &listen,
                &[Role::Node],
                "only a node of a cluster has an agent",
            ),
            (
                &agents,
                &[Role::Controller],
                "only a controller connects to agents",
            ),
            (&lost, &[Role::Controller], lists),
            (
                &objects,
                &[Role::Controller],
                "only a controller knows the objects of a cluster",
            ),
            (&tls, &[Role::Node, Role::Controller], talks),
        ];
        for (flags, roles, why) in uses {
            let given = flags.iter().find(|(_, is_given)| *is_given);
            if let Some((flag, _)) = given.filter(|_| !roles.contains(&role)) {
                let roles: Vec<_> = roles.iter().map(|role| format!("--role {role}")).collect();
                let roles = roles.join(" and ");
                return Err(BadConfig(format!(
                    "{flag} is for {roles}, not for --role {role}: {why}"
                )));
            }
        }
        Ok(())
    }

    fn tls_flags(&self) -> [(&'static str, bool); 3] {
        [
            ("--tls-cert", self.tls_cert.is_some()),
            ("--tls-key", self.tls_key.is_some()),
            ("--tls-ca", self.tls_ca.is_some()),
        ]
    }

    fn all(self) -> Result<RoleConfig, BadConfig> {
        hook::check_together(&self.hook)?;
        let hooks = self.hook.clone();
        let node = self.storage()?;
        Ok(RoleConfig::All { node, hooks })
    }

    fn node(self) -> Result<RoleConfig, BadConfig> {
        let listen = self.agent_listen.ok_or_else(|| {
            missing("--agent-listen, the address at which the controller reaches this node, such as 0.0.0.0:9820,")
        });
        let tls = self.tls();
        let peer_listen = self.peer_listen.as_ref().map(|address| address.0);
        let node = self.storage()?;
        let (listen, tls) = (listen?.0, tls?);
        let name = Name::node(&node.name);
        let name = name.map_err(|error| BadConfig(format!("--node-name: {error}")))?;
        let agent = AgentConfig {
            listen,
            peer_listen,
            name,
            tls,
        };
        Ok(RoleConfig::Node { node, agent })
    }

    fn controller(self) -> Result<RoleConfig, BadConfig> {
        let makes_its_own = self.agent_service.is_some()
            && self.tls_cert.is_none()
            && self.tls_key.is_none()
            && self.tls_ca.is_none();
        let tls = if makes_its_own {
            None
        } else {
            Some(self.tls())
        };
        let WaitTime(lost_after) = self.lost_after.unwrap_or_default();
        let WaitTime(recreate_ready_for) = self.recreate_ready_for.unwrap_or_default();
        let flags = [
            ("--lost-after", lost_after),
            ("--recreate-ready-for", recreate_ready_for),
        ];
        let mut flags = flags.iter().filter(|(_, time)| time.is_some());
        if let (Some((flag, _)), None) = (flags.next(), &self.agent_service) {
            return Err(BadConfig(format!(
                "{flag} needs --agent-service: only with the Kubernetes API does the controller learn which nodes are gone"
            )));
        }
        let snapshot_schedules = self.snapshot_schedules;
        if snapshot_schedules && self.agent_service.is_none() {
            return Err(BadConfig(
                "--snapshot-schedules needs --agent-service: schedules are objects of the Kubernetes API".into(),
            ));
        }
        let page_port = self.page_port;
        if page_port.is_some() && self.agent_service.is_none() {
            return Err(BadConfig(
                "--page-port needs --agent-service: the status page shows objects of the Kubernetes API".into(),
            ));
        }
        let metrics_per_volume = self.metrics_per_volume;
        if metrics_per_volume && self.agent_service.is_none() {
            return Err(BadConfig(
                "--metrics-per-volume needs --agent-service: a controller reports the claims of volumes, which are objects of the Kubernetes API".into(),
            ));
        }
        let agents = match (self.agent_service, self.agent) {
            (Some(service), given) if given.is_empty() => Agents::Of(service),
            (None, given) if !given.is_empty() => Agents::At(each_once(given)?),
            (None, _) => {
                return Err(missing(
                    "--agent-service, such as slackwater/slackwater-agents, or --agent, such as node-1=10.0.0.1:9820,",
                ));
            }
            (Some(_), _) => {
                return Err(BadConfig(
                    "--agent and --agent-service are mutually exclusive; give one of them".into(),
                ));
            }
        };
        Ok(RoleConfig::Controller(ControllerConfig {
            agents,
            tls: tls.transpose()?,
            lost_after,
            recreate_ready_for,
            snapshot_schedules,
            page_port,
            metrics_per_volume,
        }))
    }

    fn storage(self) -> Result<NodeConfig, BadConfig> {
        let name = self
            .node_name
            .ok_or_else(|| missing("--node-name, the name of this node,"))?;
        if self.pool.is_empty() {
            return Err(missing(
                "--pool, such as default=file:/var/lib/slackwater/pool,",
            ));
        }
        pool::check_together(&self.pool).map_err(|error| BadConfig(format!("--pool: {error}")))?;
        Ok(NodeConfig {
            name: name.0,
            pools: self.pool,
            grace_periods: self.grace_periods.unwrap_or_default(),
            state_dir: folder(self.state_dir, STATE_DIR),
            node_record: folder(self.node_record, NODE_RECORD),
            allowed_paths: allowed_paths(self.allowed_path),
            max_volumes: self.max_volumes,
            copy_rate: self.copy_rate.map(|CopyRate(bytes)| bytes),
            import_paths: self
                .import_path
                .into_iter()
                .map(|folder| folder.0)
                .collect(),
            metrics_per_volume: self.metrics_per_volume,
            inline_max_size: self.inline_max_size.map(|InlineSize(bytes)| bytes),
        })
    }

    fn tls(&self) -> Result<Files, BadConfig> {
        let file = |given: &Option<super::Folder>, what: &str| {
            let path = given.clone().map(|file| file.0);
            path.ok_or_else(|| missing(&format!("{what}, a PEM file,")))
        };
        Ok(Files {
            certificate: file(&self.tls_cert, "--tls-cert")?,
            key: file(&self.tls_key, "--tls-key")?,
            authorities: file(&self.tls_ca, "--tls-ca")?,
        })
    }
}

/// Two addresses of one node would be two agents with the same pools.
fn each_once(agents: Vec<AgentAddress>) -> Result<Vec<AgentAddress>, BadConfig> {
    let mut nodes = BTreeSet::new();
    for agent in &agents {
        let node = &agent.node;
        Name::node(node).map_err(|error| BadConfig(format!("--agent: {error}")))?;
        if !nodes.insert(node.as_str()) {
            return Err(BadConfig(format!("--agent: node {node} is given twice")));
        }
    }
    Ok(agents)
}
