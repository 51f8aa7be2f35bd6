//! Single values of the configuration, each with its rule. A value is parsed identically from a
//! flag, the environment and the file.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::BadConfig;
use crate::model::size::{MIB, parse_size};
use crate::model::snapshot::parse_duration;
use crate::model::{
    MountRule, PoolDefinition, PoolOptions, RawBlock, SnapshotSpacePolicy, TrimInterval,
};

/// Deserializes a key of the file whose text is parsed like its flag.
pub(super) fn one<'de, D, T>(from: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: fmt::Display>,
{
    let text = String::deserialize(from)?;
    text.parse().map(Some).map_err(D::Error::custom)
}

/// Deserializes an array of such texts.
pub(super) fn many<'de, D, T>(from: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: FromStr<Err: fmt::Display>,
{
    let texts: Vec<String> = Vec::deserialize(from)?;
    let parsed = texts
        .iter()
        .map(|text| text.parse().map_err(D::Error::custom));
    parsed.collect()
}

/// A Unix socket: `unix:///path/name.sock`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint(pub PathBuf);

/// sun_path has 108 bytes, including the terminating zero.
const MAX_SOCKET_PATH_BYTES: usize = 107;

impl FromStr for Endpoint {
    type Err = BadConfig;

    fn from_str(text: &str) -> Result<Endpoint, BadConfig> {
        let no = |problem: &str| Err(BadConfig(format!("{text:?} {problem}")));
        let Some(path) = text.strip_prefix("unix://") else {
            return no("is not a unix socket; give unix:///path/name.sock");
        };
        if !path.ends_with(".sock") || path.ends_with("/.sock") {
            return no("does not end in NAME.sock, which CSI requires");
        }
        if path.len() > MAX_SOCKET_PATH_BYTES {
            return no("is too long: the kernel limits socket paths to 107 bytes");
        }
        match plain_path(path) {
            Ok(path) => Ok(Endpoint(path)),
            Err(problem) => no(problem),
        }
    }
}

/// Checks that a path is absolute, without ".." and control characters; merges repeated slashes.
fn plain_path(text: &str) -> Result<PathBuf, &'static str> {
    let path = Path::new(text);
    if !path.is_absolute() {
        return Err("is not an absolute path");
    }
    if path.components().any(|part| part == Component::ParentDir) {
        return Err("contains \"..\"; give the path without it");
    }
    if text.chars().any(char::is_control) {
        return Err("contains a control character");
    }
    Ok(path.components().collect())
}

/// An absolute path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Folder(pub PathBuf);

impl FromStr for Folder {
    type Err = BadConfig;

    fn from_str(text: &str) -> Result<Folder, BadConfig> {
        plain_path(text)
            .map(Folder)
            .map_err(|problem| BadConfig(format!("{text:?} {problem}")))
    }
}

/// An address to listen on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address(pub SocketAddr);

impl FromStr for Address {
    type Err = BadConfig;

    fn from_str(text: &str) -> Result<Address, BadConfig> {
        text.parse().map(Address).map_err(|_| {
            BadConfig(format!(
                "{text:?} is not an address; give ADDR:PORT, such as 127.0.0.1:9810 or [::1]:9810"
            ))
        })
    }
}

/// Name of a node: a name that is valid in Kubernetes, or a host name with capitals and
/// underscores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeName(pub String);

impl FromStr for NodeName {
    type Err = BadConfig;

    fn from_str(text: &str) -> Result<NodeName, BadConfig> {
        let inner = |c: u8| c.is_ascii_alphanumeric() || b"-._".contains(&c);
        let ends_well = |text: &str| {
            text.starts_with(|c: char| c.is_ascii_alphanumeric())
                && text.ends_with(|c: char| c.is_ascii_alphanumeric())
        };
        if text.len() <= 253 && text.bytes().all(inner) && ends_well(text) {
            Ok(NodeName(text.into()))
        } else {
            Err(BadConfig(format!(
                "{text:?} is not a valid node name; give 1 to 253 letters, digits, '-', '.' and '_', with a letter or digit at both ends"
            )))
        }
    }
}

/// Name of the driver, within the rules of CSI and the length limit of Kubernetes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverName(pub String);

impl Default for DriverName {
    fn default() -> DriverName {
        DriverName("csi.slackwater.dev".into())
    }
}

impl FromStr for DriverName {
    type Err = BadConfig;

    fn from_str(text: &str) -> Result<DriverName, BadConfig> {
        let inner = |c: u8| c.is_ascii_alphanumeric() || b"-._".contains(&c);
        let ends_well = text.starts_with(|c: char| c.is_ascii_alphabetic())
            && text.ends_with(|c: char| c.is_ascii_alphabetic());
        if (2..=63).contains(&text.len()) && text.bytes().all(inner) && ends_well {
            Ok(DriverName(text.into()))
        } else {
            Err(BadConfig(format!(
                "{text:?} is not a valid driver name; give 2 to 63 letters, digits, '-', '.' and '_', with a letter at both ends"
            )))
        }
    }
}

/// The role of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A single node, with every service.
    All,
    /// A node of a cluster.
    Node,
    /// The controller of a cluster.
    Controller,
}

impl FromStr for Role {
    type Err = BadConfig;

    fn from_str(text: &str) -> Result<Role, BadConfig> {
        match text {
            "all" => Ok(Role::All),
            "node" => Ok(Role::Node),
            "controller" => Ok(Role::Controller),
            _ => Err(BadConfig(format!(
                "{text:?} is not a role; give all, node or controller"
            ))),
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::All => "all",
            Role::Node => "node",
            Role::Controller => "controller",
        })
    }
}

/// An agent and its address: `NODE=ADDR:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentAddress {
    /// Name of its node, which its certificate must contain.
    pub node: String,
    /// The address on which it listens.
    pub address: SocketAddr,
}

impl FromStr for AgentAddress {
    type Err = BadConfig;

    fn from_str(text: &str) -> Result<AgentAddress, BadConfig> {
        let Some((node, address)) = text.split_once('=') else {
            return Err(BadConfig(format!(
                "{text:?} is not an agent; give NODE=ADDR:PORT, such as node-1=10.0.0.1:9820"
            )));
        };
        let NodeName(node) = node.parse()?;
        let Address(address) = address.parse()?;
        Ok(AgentAddress { node, address })
    }
}

/// A Service of Kubernetes: `NAMESPACE/NAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceName {
    pub namespace: String,
    pub name: String,
}

impl FromStr for ServiceName {
    type Err = BadConfig;

    fn from_str(text: &str) -> Result<ServiceName, BadConfig> {
        let inner = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-';
        let is_label = |label: &str| {
            (1..=63).contains(&label.len())
                && label.bytes().all(inner)
                && !label.starts_with('-')
                && !label.ends_with('-')
        };
        match text.split_once('/') {
            Some((namespace, name)) if is_label(namespace) && is_label(name) => Ok(ServiceName {
                namespace: namespace.into(),
                name: name.into(),
            }),
            Some(_) | None => Err(BadConfig(format!(
                "{text:?} is not a Service; give NAMESPACE/NAME"
            ))),
        }
    }
}

/// Minimum of `--lost-after` and `--recreate-ready-for`: an agent or a node that is being restarted is
/// not gone.
const MIN_WAIT_TIME: Duration = Duration::from_secs(60);
/// Ten years. For a longer time, the flag is omitted, which means never.
const MAX_WAIT_TIME: Duration = Duration::from_secs(3650 * 24 * 3600);

/// How long something must last before the controller acts; `None` means that it never does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitTime(pub Option<Duration>);

impl FromStr for WaitTime {
    type Err = BadConfig;

    fn from_str(text: &str) -> Result<WaitTime, BadConfig> {
        if text.is_empty() {
            return Ok(WaitTime(None));
        }
        let hours = |unit: char, hours: u64| {
            let number: u64 = text.strip_suffix(unit)?.parse().ok()?;
            let seconds = number.checked_mul(hours)?.checked_mul(3600)?;
            Some(Duration::from_secs(seconds))
        };
        let parsed = hours('h', 1)
            .or_else(|| hours('d', 24))
            .or_else(|| parse_duration(text));
        match parsed.filter(|time| (MIN_WAIT_TIME..=MAX_WAIT_TIME).contains(time)) {
            Some(time) => Ok(WaitTime(Some(time))),
            None => Err(BadConfig(format!(
                "{text:?} is not a valid duration; give one from 1m to 3650d, such as 24h, or omit it for never"
            ))),
        }
    }
}

/// Maximum size of an inline volume in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InlineSize(pub u64);

impl FromStr for InlineSize {
    type Err = BadConfig;

    fn from_str(text: &str) -> Result<InlineSize, BadConfig> {
        match parse_size(text) {
            Ok(bytes) if bytes > 0 => Ok(InlineSize(bytes)),
            Ok(_) => Err(BadConfig(
                "0 is not a valid size of an inline volume; omit it to disable inline volumes"
                    .into(),
            )),
            Err(error) => Err(BadConfig(error.to_string())),
        }
    }
}

/// Maximum rate of the copies of a pool in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRate(pub u64);

impl FromStr for CopyRate {
    type Err = BadConfig;

    fn from_str(text: &str) -> Result<CopyRate, BadConfig> {
        match parse_size(text) {
            Ok(bytes) if bytes >= MIB => Ok(CopyRate(bytes)),
            Ok(_) => Err(BadConfig(format!(
                "{text:?} is not a valid rate; give at least 1Mi, the number of bytes that copies may read or write per second"
            ))),
            Err(error) => Err(BadConfig(error.to_string())),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "unix://{}", self.0.display())
    }
}

/// A pool in the file: the text of the flag, or a table, in which a path may contain a comma.
struct PoolEntry(PoolDefinition);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PoolTable {
    name: String,
    place: String,
    #[serde(default)]
    init: bool,
    #[serde(default, deserialize_with = "size")]
    image: Option<u64>,
    #[serde(default)]
    snapshots: Option<SnapshotSpacePolicy>,
    #[serde(default, deserialize_with = "size")]
    extent: Option<u64>,
    #[serde(default)]
    overcommit: Option<f64>,
    #[serde(default, deserialize_with = "one")]
    mount: Option<MountRule>,
    #[serde(default, deserialize_with = "one")]
    trim: Option<TrimInterval>,
    #[serde(default, rename = "raw-block")]
    raw_block: Option<RawBlock>,
}

/// Deserializes a text with a unit, or a number of bytes.
fn size<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    struct Size;
    impl Visitor<'_> for Size {
        type Value = u64;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a size such as \"200Gi\", or a number of bytes")
        }

        fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<u64, E> {
            parse_size(text).map_err(E::custom)
        }

        fn visit_i64<E: serde::de::Error>(self, bytes: i64) -> Result<u64, E> {
            u64::try_from(bytes).map_err(|_| E::custom(format!("{bytes} is not a valid size")))
        }
    }
    from.deserialize_any(Size).map(Some)
}

/// Implemented manually, because an untagged enum does not report what is wrong in a table.
struct PoolVisitor;

impl<'de> Visitor<'de> for PoolVisitor {
    type Value = PoolEntry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string such as \"NAME=file:/path\", or a table with name and place")
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<PoolEntry, E> {
        text.parse().map(PoolEntry).map_err(E::custom)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<PoolEntry, A::Error> {
        let table = PoolTable::deserialize(MapAccessDeserializer::new(map))?;
        let options = PoolOptions {
            init: table.init,
            image: table.image,
            snapshots: table.snapshots,
            extent: table.extent,
            overcommit: table.overcommit,
            mount: table.mount,
            trim: table.trim,
            raw_block: table.raw_block,
        };
        PoolDefinition::from_parts(&table.name, &table.place, options)
            .map(PoolEntry)
            .map_err(A::Error::custom)
    }
}

impl<'de> Deserialize<'de> for PoolEntry {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<PoolEntry, D::Error> {
        from.deserialize_any(PoolVisitor)
    }
}

/// Deserializes `pool` in the file: an array of texts or tables.
pub(super) fn pools<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<PoolDefinition>, D::Error> {
    let entries: Vec<PoolEntry> = Vec::deserialize(from)?;
    Ok(entries.into_iter().map(|PoolEntry(pool)| pool).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_of_copies() {
        let parse = |text: &str| text.parse::<CopyRate>().map(|CopyRate(bytes)| bytes);
        assert_eq!(parse("100Mi"), Ok(100 * MIB));
        assert_eq!(parse("1048576"), Ok(MIB));
        for bad in ["0", "1", "1023Ki", "", "fast", "-1Mi"] {
            parse(bad).unwrap_err();
        }
        let why = parse("256").unwrap_err().to_string();
        assert!(why.contains("256") && why.contains("1Mi"), "{why}");
    }

    #[test]
    fn a_time_after_which_the_controller_acts() {
        let parse = |text: &str| text.parse::<WaitTime>().map(|WaitTime(time)| time);
        let hours = |hours: u64| Ok(Some(Duration::from_secs(hours * 3600)));
        assert_eq!(parse("24h"), hours(24));
        assert_eq!(parse("7d"), hours(7 * 24));
        assert_eq!(parse("90m"), Ok(Some(Duration::from_secs(5400))));
        assert_eq!(parse("60s"), Ok(Some(Duration::from_secs(60))));
        assert_eq!(parse(""), Ok(None), "never");
        for bad in [
            "0",
            "24",
            "h",
            "0h",
            "59s",
            "-1h",
            "1w",
            "3651d",
            "1.5h",
            "9999999999999999999h",
        ] {
            let sentence = parse(bad).unwrap_err().to_string();
            assert!(
                sentence.contains(bad) && sentence.contains("such as 24h"),
                "{sentence}"
            );
        }
    }
}
