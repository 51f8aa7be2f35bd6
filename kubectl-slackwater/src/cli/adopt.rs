//! The options of `orphans --adopt`.

use clap::Args;

use crate::transfer::step::NamespacedName;

/// What an adopted orphan becomes.
#[derive(Clone, Debug, Default, Args)]
pub struct AdoptArguments {
    /// Create a PersistentVolume and a claim for this volume, or a VolumeSnapshot for this snapshot, with its data
    #[arg(
        long,
        value_name = "ID",
        conflicts_with_all = ["watch", "delete", "keep", "now", "selector"]
    )]
    pub adopt: Option<String>,
    /// The claim; by default the one for which the volume was created
    #[arg(long = "claim", value_name = "NAMESPACE/NAME", requires = "adopt", value_parser = parse_name)]
    pub new_claim: Option<NamespacedName>,
    /// The VolumeSnapshot, for a snapshot
    #[arg(
        long = "snapshot",
        value_name = "NAMESPACE/NAME",
        requires = "adopt",
        conflicts_with_all = ["new_claim", "storage_class"],
        value_parser = parse_name
    )]
    pub new_snapshot: Option<NamespacedName>,
    /// StorageClass of the PersistentVolume and the claim; '' is none [default: slackwater]
    #[arg(long = "class", value_name = "NAME", requires = "adopt")]
    pub storage_class: Option<String>,
    /// Name of the PersistentVolume or VolumeSnapshotContent [default: adopted-UUID, of the ID]
    #[arg(long = "name", value_name = "NAME", requires = "adopt")]
    pub owner: Option<String>,
}

impl AdoptArguments {
    /// The class, by default that of the chart's example.
    pub fn class(&self) -> &str {
        self.storage_class.as_deref().unwrap_or("slackwater")
    }
}

fn parse_name(text: &str) -> Result<NamespacedName, String> {
    match text.split_once('/') {
        Some((namespace, name)) if !namespace.is_empty() && is_name(name) => Ok(NamespacedName {
            namespace: namespace.into(),
            name: name.into(),
        }),
        _ => Err("give NAMESPACE/NAME".into()),
    }
}

fn is_name(name: &str) -> bool {
    !name.is_empty() && !name.contains('/')
}
