//! From flags, file and environment to one validated [`Config`].
//!
//! A key in the file has the name of its flag. A flag overrides the environment, and the
//! environment overrides the file; a flag that can be repeated replaces the file's whole list. An
//! error is one sentence that names the flag, or the file and its line.

mod hook;
mod role;
mod value;

use std::num::NonZeroU16;
use std::path::{Path, PathBuf};

use serde::Deserialize;

pub use role::{AgentConfig, Agents, Config, ControllerConfig, NodeConfig, RoleConfig};
pub use value::{
    Address, AgentAddress, CopyRate, DriverName, Endpoint, Folder, InlineSize, NodeName, Role,
    ServiceName, WaitTime,
};

use crate::hook::HookDefinition;
use crate::host::freezer::GracePeriods;
use crate::model::PoolDefinition;
use crate::model::alpha::Alpha;
use crate::telemetry::LogFormat;

/// Default path of the node record: on the machine's own disk.
pub const NODE_RECORD: &str = "/var/lib/slackwater/node.json";
/// Default directory of the freeze journal: it survives the process, but not a reboot.
pub const STATE_DIR: &str = "/run/slackwater/state";
/// Default directory below which mounts are made: the kubelet's.
pub const ALLOWED_PATH: &str = "/var/lib/kubelet";

/// An invalid configuration, described in one sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadConfig(pub String);

/// All settings of `serve`, as flags and as keys of the file.
#[derive(Clone, Debug, Default, clap::Args, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Given {
    /// CSI socket to serve, unix:///path/to/csi.sock [env: CSI_ENDPOINT]
    #[arg(long, value_name = "ENDPOINT")]
    #[serde(deserialize_with = "value::one")]
    pub endpoint: Option<Endpoint>,
    /// Name of this node; in Kubernetes, the name of its Node object
    #[arg(long, value_name = "NODE")]
    #[serde(deserialize_with = "value::one")]
    pub node_name: Option<NodeName>,
    /// Pools, in order.
    #[arg(
        long,
        value_name = "POOL",
        help = "Pool: NAME=file:/path[,init][,image=SIZE][,snapshots=reserved|best-effort][,extent=SIZE][,overcommit=N][,mount=required|any][,trim=7d] or NAME=lvm:VG/POOL[,init][,snapshots=...][,overcommit=N][,trim=7d][,rawBlock=unfiltered] or NAME=memory: or NAME=memory-thin: (may be repeated)"
    )]
    #[serde(deserialize_with = "value::pools")]
    pub pool: Vec<PoolDefinition>,
    /// Role of this process: all (a single node), node or controller (of a cluster) [default: all]
    #[arg(long, value_name = "ROLE")]
    #[serde(deserialize_with = "value::one")]
    pub role: Option<Role>,
    /// Name of the driver [default: csi.slackwater.dev]
    #[arg(long, value_name = "NAME")]
    #[serde(deserialize_with = "value::one")]
    pub driver_name: Option<DriverName>,
    /// How a freeze waits for the kernel's RCU grace periods: expedited (takes about 1 ms and sets
    /// /sys/kernel/rcu_expedited during the freeze) or normal (takes about 25 ms)
    /// [default: expedited]
    #[arg(long, value_name = "HOW")]
    #[serde(deserialize_with = "value::one")]
    pub grace_periods: Option<GracePeriods>,
    /// Directory for state that must survive a restart of the driver but not a reboot
    /// [default: /run/slackwater/state]
    #[arg(long, value_name = "DIR")]
    #[serde(deserialize_with = "value::one")]
    pub state_dir: Option<Folder>,
    /// File on the machine's own disk that records its pools [default: /var/lib/slackwater/node.json]
    #[arg(long, value_name = "FILE")]
    #[serde(deserialize_with = "value::one")]
    pub node_record: Option<Folder>,
    /// Directory below which the driver may mount volumes (may be repeated) [default: /var/lib/kubelet]
    #[arg(long, value_name = "DIR")]
    #[serde(deserialize_with = "value::many")]
    pub allowed_path: Vec<Folder>,
    /// Allow inline volumes of at most this size each, such as 10Gi [default: not allowed]
    #[arg(long, value_name = "SIZE")]
    #[serde(deserialize_with = "value::one")]
    pub inline_max_size: Option<InlineSize>,
    /// Maximum number of volumes that the scheduler places on this node, 1 to 65535; at the limit
    /// no inline volumes are created either [default: no limit]
    #[arg(long, value_name = "N")]
    pub max_volumes: Option<NonZeroU16>,
    /// Maximum rate at which all copies together read or write a pool, in bytes per second, such as
    /// 100Mi [default: 256Mi]
    #[arg(long, value_name = "SIZE")]
    #[serde(deserialize_with = "value::one")]
    pub copy_rate: Option<CopyRate>,
    /// Directory with files of other drivers that `volumes import` may clone (may be repeated)
    /// [default: none]
    #[arg(long, value_name = "DIR")]
    #[serde(deserialize_with = "value::many")]
    pub import_path: Vec<Folder>,
    /// Address that serves /metrics, /healthz and /readyz, such as 127.0.0.1:9810 [default: none]
    #[arg(long, value_name = "ADDR:PORT")]
    #[serde(deserialize_with = "value::one")]
    pub metrics_address: Option<Address>,
    /// Role controller: port of 127.0.0.1 that serves a read-only status page, such as 9830
    /// [default: none]
    #[arg(long, value_name = "PORT")]
    pub page_port: Option<NonZeroU16>,
    /// Also report metrics of single volumes. Roles all and node: their bytes and their last cut. Role
    /// controller: their claims
    #[arg(long)]
    pub metrics_per_volume: bool,
    /// Log format: text or json [default: text]
    #[arg(long, value_name = "FORMAT")]
    #[serde(deserialize_with = "value::one")]
    pub log_format: Option<LogFormat>,
    /// Alpha features of CSI to enable, separated by commas
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    #[serde(deserialize_with = "value::many")]
    pub alpha: Vec<Alpha>,
    /// Hooks; in the file alone.
    #[arg(skip)]
    pub hook: Vec<HookDefinition>,

    /// Role node: address on which the agent listens for the controller, such as 0.0.0.0:9820
    #[arg(long, value_name = "ADDR:PORT")]
    #[serde(deserialize_with = "value::one")]
    pub agent_listen: Option<Address>,
    /// Role node: address at which the agent sends snapshots to the agents of other nodes, such as
    /// 0.0.0.0:9821 [default: none]
    #[arg(long, value_name = "ADDR:PORT")]
    #[serde(deserialize_with = "value::one")]
    pub peer_listen: Option<Address>,
    /// Role controller: node name and address of an agent (may be repeated)
    #[arg(long, value_name = "NODE=ADDR:PORT")]
    #[serde(deserialize_with = "value::many")]
    pub agent: Vec<AgentAddress>,
    /// Role controller: the headless Service whose endpoints are the agents
    #[arg(long, value_name = "NAMESPACE/NAME")]
    #[serde(deserialize_with = "value::one")]
    pub agent_service: Option<ServiceName>,
    /// Role controller: mark a pool as lost, so that its volumes count as deleted, after its Node
    /// object and its agent have been gone for this long, such as 24h [default: never]
    #[arg(long, value_name = "DURATION")]
    #[serde(deserialize_with = "value::one")]
    pub lost_after: Option<WaitTime>,
    /// Role controller: delete claims with onNodeLost=recreate whose node is lost, so that their
    /// StatefulSet creates them again, if more than half of its replicas have been Ready for this long,
    /// such as 5m [default: never]
    #[arg(long, value_name = "DURATION")]
    #[serde(deserialize_with = "value::one")]
    pub recreate_ready_for: Option<WaitTime>,
    /// Role controller: execute the SnapshotSchedule objects of the cluster
    #[arg(long)]
    pub snapshot_schedules: bool,
    /// Roles node and controller: certificate of this process, PEM; reloaded when it changes
    #[arg(long, value_name = "FILE")]
    #[serde(deserialize_with = "value::one")]
    pub tls_cert: Option<Folder>,
    /// Roles node and controller: private key of this process, PEM
    #[arg(long, value_name = "FILE")]
    #[serde(deserialize_with = "value::one")]
    pub tls_key: Option<Folder>,
    /// Roles node and controller: CA certificates that sign the peer's certificate, PEM
    #[arg(long, value_name = "FILE")]
    #[serde(deserialize_with = "value::one")]
    pub tls_ca: Option<Folder>,
}

/// Reads a configuration file.
pub fn read_file(path: &Path) -> Result<Given, BadConfig> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| BadConfig(format!("--config {}: {error}", path.display())))?;
    parse_file(path, &text)
}

/// Parses the text of a configuration file; `path` is used in the error.
pub fn parse_file(path: &Path, text: &str) -> Result<Given, BadConfig> {
    toml::from_str(text).map_err(|error| {
        let line = error
            .span()
            .map(|span| text[..span.start.min(text.len())].matches('\n').count() + 1);
        let place = line.map_or(String::new(), |line| format!(", line {line}"));
        let message = one_line(error.message());
        BadConfig(format!("{}{place}: {message}", path.display()))
    })
}

/// Converts a message of a library to one line without control characters.
pub(crate) fn one_line(message: &str) -> String {
    message
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
        .replace(char::is_control, "?")
}

impl Given {
    /// These values, and those of the file where these are not set.
    pub fn over(self, file: Given) -> Given {
        fn list<T>(first: Vec<T>, second: Vec<T>) -> Vec<T> {
            if first.is_empty() { second } else { first }
        }
        Given {
            endpoint: self.endpoint.or(file.endpoint),
            node_name: self.node_name.or(file.node_name),
            pool: list(self.pool, file.pool),
            role: self.role.or(file.role),
            driver_name: self.driver_name.or(file.driver_name),
            grace_periods: self.grace_periods.or(file.grace_periods),
            state_dir: self.state_dir.or(file.state_dir),
            node_record: self.node_record.or(file.node_record),
            allowed_path: list(self.allowed_path, file.allowed_path),
            inline_max_size: self.inline_max_size.or(file.inline_max_size),
            copy_rate: self.copy_rate.or(file.copy_rate),
            import_path: list(self.import_path, file.import_path),
            max_volumes: self.max_volumes.or(file.max_volumes),
            metrics_address: self.metrics_address.or(file.metrics_address),
            page_port: self.page_port.or(file.page_port),
            metrics_per_volume: self.metrics_per_volume || file.metrics_per_volume,
            log_format: self.log_format.or(file.log_format),
            alpha: list(self.alpha, file.alpha),
            hook: list(self.hook, file.hook),
            agent_listen: self.agent_listen.or(file.agent_listen),
            peer_listen: self.peer_listen.or(file.peer_listen),
            agent: list(self.agent, file.agent),
            agent_service: self.agent_service.or(file.agent_service),
            lost_after: self.lost_after.or(file.lost_after),
            recreate_ready_for: self.recreate_ready_for.or(file.recreate_ready_for),
            snapshot_schedules: self.snapshot_schedules || file.snapshot_schedules,
            tls_cert: self.tls_cert.or(file.tls_cert),
            tls_key: self.tls_key.or(file.tls_key),
            tls_ca: self.tls_ca.or(file.tls_ca),
        }
    }

    /// These values; those that are not given are taken from a file.
    pub fn over_file(self, file: Option<&Path>) -> Result<Given, BadConfig> {
        Ok(match file {
            Some(path) => self.over(read_file(path)?),
            None => self,
        })
    }

    /// Takes the endpoint from the environment if no flag sets it. An empty value counts as not
    /// set.
    pub fn with_env(mut self, endpoint: Option<String>) -> Result<Given, BadConfig> {
        if let Some(text) = endpoint.filter(|text| self.endpoint.is_none() && !text.is_empty()) {
            let parsed = text.parse();
            self.endpoint =
                Some(parsed.map_err(|error| BadConfig(format!("CSI_ENDPOINT: {error}")))?);
        }
        Ok(self)
    }
}

/// `--node-record`, or its default.
pub fn folder(given: Option<Folder>, default: &str) -> PathBuf {
    given.map_or_else(|| PathBuf::from(default), |folder| folder.0)
}

/// `--allowed-path`, or its default.
pub fn allowed_paths(given: Vec<Folder>) -> Vec<PathBuf> {
    if given.is_empty() {
        return vec![PathBuf::from(ALLOWED_PATH)];
    }
    given.into_iter().map(|folder| folder.0).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(text: &str) -> Given {
        parse_file(Path::new("c.toml"), text).unwrap()
    }

    const LEAST: &str =
        "endpoint = \"unix:///x/csi.sock\"\nnode-name = \"n1\"\npool = [\"default=memory:\"]\n";

    #[test]
    fn what_is_not_said_has_its_default() {
        insta::assert_debug_snapshot!(file(LEAST).finish().unwrap());
    }

    #[test]
    fn every_key_of_the_file_is_taken() {
        let text = r#"
            endpoint = "unix:///x/csi.sock"
            node-name = "n1"
            role = "all"
            driver-name = "local.example.org"
            grace-periods = "normal"
            state-dir = "/s"
            node-record = "/n.json"
            allowed-path = ["/k/", "/l"]
            inline-max-size = "10Gi"
            max-volumes = 100
            copy-rate = "100Mi"
            import-path = ["/opt/a", "/var/csi/rawfile"]
            metrics-address = "[::1]:9810"
            log-format = "json"
            alpha = ["health", "get-volume"]
            [[pool]]
            name = "a"
            place = "file:/disks/a,b"
            [[pool]]
            name = "b"
            place = "file:/disks/b"
            init = true
            image = "200Gi"
            overcommit = 2
            mount = "any"
            trim = "7d"
        "#;
        insta::assert_debug_snapshot!(file(text).finish().unwrap());
    }

    #[test]
    fn every_key_of_the_clusters_roles_is_taken() {
        let tls = "tls-cert = \"/t/tls.crt\"\ntls-key = \"/t/tls.key\"\ntls-ca = \"/t/ca.crt\"\n";
        let node = format!(
            "{LEAST}{tls}role = \"node\"\nagent-listen = \"0.0.0.0:9820\"\npeer-listen = \"0.0.0.0:9821\""
        );
        let controller = format!("endpoint = \"unix:///x/csi.sock\"\n{tls}role = \"controller\"\n");
        let agents = format!("{controller}agent = [\"n1=10.0.0.1:9820\", \"n2=[::1]:1\"]");
        let service = format!(
            "{controller}agent-service = \"slackwater/agents\"\nlost-after = \"24h\"\nrecreate-ready-for = \"5m\"\npage-port = 9830\nmetrics-per-volume = true"
        );
        insta::assert_debug_snapshot!(
            [node, agents, service].map(|text| file(&text).finish().unwrap())
        );
    }

    #[test]
    fn a_flag_wins_and_one_that_may_be_repeated_replaces_the_list() {
        let flags = file("node-name = \"n2\"\npool = [\"b=file:/b\"]\nallowed-path = [\"/b\"]");
        let text = format!("{LEAST}allowed-path = [\"/a\", \"/c\"]\ndriver-name = \"a.b\"");
        let config = flags.over(file(&text)).finish().unwrap();
        assert_eq!(config.driver_name, "a.b");
        let node = config.node().unwrap();
        assert_eq!(node.name, "n2");
        assert_eq!(node.pools, ["b=file:/b".parse().unwrap()]);
        assert_eq!(node.allowed_paths, [PathBuf::from("/b")]);
        assert!(!node.is_simulated());
    }

    proptest! {
        #[test]
        fn any_file_is_taken_or_refused_in_one_line(text in any::<String>(), key in "[a-z-]{1,12}") {
            for text in [&text, &format!("{key} = {text:?}"), &format!("{LEAST}{text}")] {
                if let Err(BadConfig(sentence)) = parse_file(Path::new("c.toml"), text) {
                    prop_assert!(!sentence.chars().any(char::is_control), "{sentence:?}");
                }
            }
        }

        #[test]
        fn any_endpoint_that_is_taken_can_be_bound(text in "(unix://)?(/[a-z./]{0,120})?\\PC{0,4}(.sock)?") {
            if let Ok(Endpoint(path)) = text.parse::<Endpoint>() {
                prop_assert!(path.is_absolute());
                prop_assert!(path.file_name().is_some());
                prop_assert!(path.as_os_str().len() <= 107);
            }
        }
    }
}
