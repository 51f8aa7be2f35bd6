//! Parameters of a StorageClass, of a VolumeAttributesClass, and of an inline volume.
//!
//! An unknown key is refused with its name, so that a typing error never silently becomes a
//! default. Keys with the prefix `csi.storage.k8s.io/` belong to the sidecars and are ignored,
//! except for the PVC's name.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::mkfs;
use super::size;
use crate::error::Error;

/// Prefix of the keys that the sidecars set.
pub const SIDECAR_PREFIX: &str = "csi.storage.k8s.io/";
/// Keys that the provisioner adds with `--extra-create-metadata`.
const CLAIM_NAMESPACE: &str = "csi.storage.k8s.io/pvc/namespace";
const CLAIM_NAME: &str = "csi.storage.k8s.io/pvc/name";

/// When the blocks of a volume are allocated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Allocation {
    /// On first write.
    #[default]
    Thin,
    /// At creation.
    Thick,
}

impl Allocation {
    /// The value in a class.
    pub fn as_str(self) -> &'static str {
        match self {
            Allocation::Thin => "thin",
            Allocation::Thick => "thick",
        }
    }
}

/// What DeleteVolume does to the blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wipe {
    /// Frees them; a new file on the pool reads as zeros there.
    #[default]
    None,
    /// Overwrites them with zeros first.
    Zero,
    /// Discards them on the pool's disk.
    Discard,
}

impl Wipe {
    /// The value in a class.
    pub fn as_str(self) -> &'static str {
        match self {
            Wipe::None => "none",
            Wipe::Zero => "zero",
            Wipe::Discard => "discard",
        }
    }
}

/// On which node a volume with a content source is created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Restore {
    /// On the node of the source; the pod follows.
    Source,
    /// On the node that is selected for the PVC; the snapshot is copied there.
    Pod,
    /// On one node for all volumes of the pod: that of the sources if the pod can run there, else the
    /// selected one.
    #[default]
    Auto,
}

/// The parameters of a StorageClass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeParameters {
    /// Name of the pool; `None` selects the default pool.
    pub pool: Option<String>,
    /// Thin or thick.
    pub allocation: Allocation,
    /// Logical block size of the loop device; `None` selects the pool's own.
    pub block_size: Option<u32>,
    /// Additional arguments of mkfs.
    pub mkfs_options: Vec<String>,
    /// What DeleteVolume does to the blocks.
    pub wipe: Wipe,
    /// Raw block volumes of pools of image files are published with a device that can be suspended, so
    /// that they can join groups.
    pub block_groups: bool,
    /// On which node a volume with a content source is created, in a cluster. It is not an attribute
    /// of the volume either.
    pub restore: Restore,
    /// `namespace/name` of the PVC, if the provisioner passes it. It is not an attribute of the
    /// volume: repeated calls that differ in it are equal.
    pub claim: Option<String>,
}

impl Default for VolumeParameters {
    fn default() -> VolumeParameters {
        VolumeParameters {
            pool: None,
            allocation: Allocation::default(),
            block_size: None,
            mkfs_options: Vec::new(),
            wipe: Wipe::default(),
            block_groups: true,
            restore: Restore::default(),
            claim: None,
        }
    }
}

/// Parameters that ControllerModifyVolume may change. `None` leaves the present value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MutableParameters {
    /// What DeleteVolume does to the blocks.
    pub wipe: Option<Wipe>,
}

const KNOWN: &str =
    "pool, allocation, blockSize, mkfsOptions, wipe, blockGroups, restore, onNodeLost";
const KNOWN_MUTABLE: &str = "wipe";

impl VolumeParameters {
    /// Parses the parameters of a class; `field` is the CSI field that contains the map.
    pub fn parse<'a>(
        field: &str,
        map: impl IntoIterator<Item = (&'a String, &'a String)>,
    ) -> Result<VolumeParameters, Error> {
        let mut parsed = VolumeParameters::default();
        let sorted = sorted(map);
        parsed.claim = parse_claim(&sorted);
        for (key, value) in sorted {
            match key {
                "pool" => parsed.pool = Some(parse_pool(field, value)?),
                "allocation" => parsed.allocation = parse_allocation(field, value)?,
                "blockSize" => parsed.block_size = parse_block_size(field, value)?,
                "mkfsOptions" => parsed.mkfs_options = mkfs::split(value),
                "wipe" => parsed.wipe = parse_wipe(field, value)?,
                "blockGroups" => parsed.block_groups = parse_block_groups(field, value)?,
                "restore" => parsed.restore = parse_restore(field, value)?,
                "onNodeLost" => check_on_node_lost(field, value)?,
                _ if key.starts_with(SIDECAR_PREFIX) => {}
                _ => return Err(unknown(field, key, KNOWN)),
            }
        }
        Ok(parsed)
    }
}

impl MutableParameters {
    /// Parses the mutable parameters.
    pub fn parse<'a>(
        map: impl IntoIterator<Item = (&'a String, &'a String)>,
    ) -> Result<MutableParameters, Error> {
        const FIELD: &str = "mutable_parameters";
        let mut parsed = MutableParameters::default();
        for (key, value) in sorted(map) {
            match key {
                "wipe" => parsed.wipe = Some(parse_wipe(FIELD, value)?),
                _ if key.starts_with(SIDECAR_PREFIX) => {}
                _ => return Err(unknown(FIELD, key, KNOWN_MUTABLE)),
            }
        }
        Ok(parsed)
    }
}

/// The attributes of an inline volume. They are set by the author of a pod, who may choose only
/// `size`; all other parameters belong to a StorageClass and so to administrators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EphemeralParameters {
    /// Size in bytes; required.
    pub size: u64,
    /// Another key, for which a new volume is refused. Volumes of earlier releases may have some.
    pub other: Option<String>,
}

impl EphemeralParameters {
    /// Parses the `volume_context` of an inline volume.
    pub fn parse<'a>(
        map: impl IntoIterator<Item = (&'a String, &'a String)>,
    ) -> Result<EphemeralParameters, Error> {
        const FIELD: &str = "volume_context";
        let mut given = sorted(map);
        let Some(text) = given.remove("size") else {
            return Err(Error::invalid(
                format!("{FIELD}.size"),
                "is missing; an inline volume needs one, such as \"1Gi\"",
            ));
        };
        let size = size::parse_size(text)
            .ok()
            .filter(|size| *size > 0)
            .ok_or_else(|| {
                Error::invalid(
                    format!("{FIELD}.size"),
                    size::NotASize(text.to_string()).to_string(),
                )
            })?;
        let mut others = given.into_keys();
        let other = others.find(|key| !key.starts_with(SIDECAR_PREFIX));
        Ok(EphemeralParameters {
            size,
            other: other.map(str::to_string),
        })
    }

    /// Refuses attributes that a new volume must not have.
    pub fn check_new(&self) -> Result<(), Error> {
        match &self.other {
            None => Ok(()),
            Some(key) => Err(Error::invalid(
                format!("volume_context[{key:?}]"),
                "is not a parameter of inline volumes; a pod can only set size (use a generic ephemeral volume with a StorageClass for others)",
            )),
        }
    }
}

/// Sorted by key, so that the first error is always the same.
fn sorted<'a>(
    map: impl IntoIterator<Item = (&'a String, &'a String)>,
) -> BTreeMap<&'a str, &'a str> {
    map.into_iter()
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect()
}

/// Parses the PVC. Its names must be valid in Kubernetes, so that they can be used in patterns and
/// logs; anything else counts as no PVC.
fn parse_claim(map: &BTreeMap<&str, &str>) -> Option<String> {
    let (namespace, name) = (map.get(CLAIM_NAMESPACE)?, map.get(CLAIM_NAME)?);
    let claim = format!("{namespace}/{name}");
    is_claim(&claim).then_some(claim)
}

/// Whether a text can be the namespace and the name of a PVC, as [`VolumeParameters::claim`] has them: a
/// DNS label and a DNS subdomain.
pub fn is_claim(text: &str) -> bool {
    text.split_once('/').is_some_and(|(namespace, name)| {
        is_label(namespace) && namespace.len() <= LABEL_BYTES && is_object_name(name)
    })
}

/// Whether a text can be the name of an object of Kubernetes: a DNS subdomain.
pub fn is_object_name(name: &str) -> bool {
    name.split('.').all(is_label) && name.len() <= SUBDOMAIN_BYTES
}

fn unknown(field: &str, key: &str, known: &str) -> Error {
    Error::invalid(
        format!("{field}[{key:?}]"),
        format!("is not a parameter of this driver; known are {known}"),
    )
}

fn bad(field: &str, key: &str, value: &str, right: &str) -> Error {
    Error::invalid(
        format!("{field}.{key}"),
        format!("{value:?} is not valid; give {right}"),
    )
}

fn parse_pool(field: &str, value: &str) -> Result<String, Error> {
    if is_pool_name(value) {
        Ok(value.to_string())
    } else {
        Err(bad(
            field,
            "pool",
            value,
            "the name of a pool: 1 to 63 of a-z, 0-9 and '-'",
        ))
    }
}

/// Whether a name is valid for a pool: a DNS label, so that it can be used in labels, metrics and
/// file names.
pub fn is_pool_name(name: &str) -> bool {
    is_label(name) && name.len() <= LABEL_BYTES
}

/// The limits of RFC 1123, as Kubernetes checks them.
const LABEL_BYTES: usize = 63;
const SUBDOMAIN_BYTES: usize = 253;

/// Whether a name is a DNS label, of any length.
fn is_label(name: &str) -> bool {
    let inner = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    !name.is_empty()
        && name.bytes().all(|c| inner(c) || c == b'-')
        && !name.starts_with('-')
        && !name.ends_with('-')
}

fn parse_allocation(field: &str, value: &str) -> Result<Allocation, Error> {
    [Allocation::Thin, Allocation::Thick]
        .into_iter()
        .find(|allocation| allocation.as_str() == value)
        .ok_or_else(|| bad(field, "allocation", value, "thin or thick"))
}

fn parse_wipe(field: &str, value: &str) -> Result<Wipe, Error> {
    [Wipe::None, Wipe::Zero, Wipe::Discard]
        .into_iter()
        .find(|wipe| wipe.as_str() == value)
        .ok_or_else(|| bad(field, "wipe", value, "none, zero or discard"))
}

fn parse_block_groups(field: &str, value: &str) -> Result<bool, Error> {
    value
        .parse()
        .map_err(|_| bad(field, "blockGroups", value, "true or false"))
}

fn parse_restore(field: &str, value: &str) -> Result<Restore, Error> {
    match value {
        "source" => Ok(Restore::Source),
        "pod" => Ok(Restore::Pod),
        "auto" => Ok(Restore::Auto),
        _ => Err(bad(field, "restore", value, "source, pod or auto")),
    }
}

/// What happens to a claim whose node is lost. Only the router of a cluster reads it, from the class.
fn check_on_node_lost(field: &str, value: &str) -> Result<(), Error> {
    match value {
        "keep" | "recreate" => Ok(()),
        _ => Err(bad(field, "onNodeLost", value, "keep or recreate")),
    }
}

/// An empty value selects the pool's own block size.
fn parse_block_size(field: &str, value: &str) -> Result<Option<u32>, Error> {
    match value {
        "" => Ok(None),
        "512" => Ok(Some(512)),
        "4096" => Ok(Some(4096)),
        _ => Err(bad(
            field,
            "blockSize",
            value,
            "512 or 4096, or omit it for the default of the pool",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    fn map(pairs: &[(&str, &str)]) -> HashMap<String, String> {
        pairs
            .iter()
            .map(|(k, v)| (k.to_string(), v.to_string()))
            .collect()
    }

    #[test]
    fn the_default_is_thin_without_wipe() {
        assert_eq!(
            VolumeParameters::parse("parameters", &map(&[])).unwrap(),
            VolumeParameters::default()
        );
    }

    /// Users have classes with these keys and values.
    #[test]
    fn every_key_of_a_class_is_accepted() {
        let given = map(&[
            ("pool", "fast"),
            ("allocation", "thick"),
            ("blockSize", "4096"),
            ("mkfsOptions", "-i 16384"),
            ("wipe", "zero"),
            ("blockGroups", "false"),
            ("restore", "pod"),
            ("onNodeLost", "recreate"),
        ]);
        assert_eq!(given.len(), KNOWN.split(", ").count());
        let expected = VolumeParameters {
            pool: Some("fast".into()),
            allocation: Allocation::Thick,
            block_size: Some(4096),
            mkfs_options: vec!["-i".into(), "16384".into()],
            wipe: Wipe::Zero,
            block_groups: false,
            restore: Restore::Pod,
            claim: None,
        };
        let parsed = VolumeParameters::parse("parameters", &given).unwrap();
        assert_eq!(parsed, expected);
    }

    #[test]
    fn the_sidecars_keys_are_ignored() {
        let given = map(&[
            ("csi.storage.k8s.io/pvc/name", "x"),
            ("allocation", "thick"),
        ]);
        let parsed = VolumeParameters::parse("parameters", &given).unwrap();
        assert_eq!(parsed.allocation, Allocation::Thick);
    }

    #[test]
    fn a_claim_is_known_by_both_its_names_and_only_if_they_are_names() {
        let claim = |namespace: &str, name: &str| {
            let given = map(&[(CLAIM_NAMESPACE, namespace), (CLAIM_NAME, name)]);
            VolumeParameters::parse("parameters", &given).unwrap().claim
        };
        assert_eq!(claim("shop", "data-db-0"), Some("shop/data-db-0".into()));
        assert_eq!(claim("shop", "a.b-c.9"), Some("shop/a.b-c.9".into()));
        for (namespace, name) in [
            ("", "db"),
            ("shop", ""),
            ("a.b", "db"),
            ("shop", "a/b"),
            ("shop", "a..b"),
            ("shop", "-a"),
            ("shop", "Db"),
            ("shop", "d\nb"),
            ("shop", &"x".repeat(254)),
            (&"x".repeat(64), "db"),
        ] {
            assert_eq!(claim(namespace, name), None, "{namespace:?} {name:?}");
        }
        let half = map(&[(CLAIM_NAME, "db")]);
        let parsed = VolumeParameters::parse("parameters", &half).unwrap();
        assert_eq!(parsed.claim, None);
    }

    #[test]
    fn a_pod_chooses_the_size_of_an_inline_volume_and_nothing_else() {
        for key in [
            "pool",
            "allocation",
            "blockSize",
            "mkfsOptions",
            "wipe",
            "colour",
        ] {
            let given = map(&[(key, "x"), ("size", "1Gi")]);
            let parsed = EphemeralParameters::parse(&given).unwrap();
            let error = parsed.check_new().unwrap_err().to_string();
            assert!(error.contains(&format!("{key:?}")), "{error}");
        }
        let kubelets = map(&[("csi.storage.k8s.io/pod.name", "a"), ("size", "1Gi")]);
        let parsed = EphemeralParameters::parse(&kubelets).unwrap();
        parsed.check_new().unwrap();
    }

    #[test]
    fn an_unknown_key_is_named_with_the_known_ones() {
        let error =
            VolumeParameters::parse("parameters", &map(&[("alocation", "thin")])).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("\"alocation\"") && text.contains("mkfsOptions"),
            "{text}"
        );
    }

    #[test]
    fn an_inline_volume_needs_a_size() {
        assert!(EphemeralParameters::parse(&map(&[])).is_err());
        assert!(EphemeralParameters::parse(&map(&[("size", "0")])).is_err());
        let parsed = EphemeralParameters::parse(&map(&[("size", "2Gi")])).unwrap();
        assert_eq!(parsed.size, 2 << 30);
    }

    proptest! {
        #[test]
        fn any_map_is_parsed_without_a_panic(given in prop::collection::hash_map(any::<String>(), any::<String>(), 0..6)) {
            let _ = VolumeParameters::parse("parameters", &given);
            let _ = MutableParameters::parse(&given);
            let _ = EphemeralParameters::parse(&given);
        }

        #[test]
        fn any_value_of_a_known_key_is_parsed_without_a_panic(key in prop_oneof![Just("pool"), Just("allocation"), Just("blockSize"), Just("mkfsOptions"), Just("wipe"), Just("blockGroups")], value in any::<String>()) {
            let given = HashMap::from([(key.to_string(), value.clone())]);
            if let Err(error) = VolumeParameters::parse("parameters", &given) {
                prop_assert!(error.to_string().contains(key));
            }
        }
    }
}
