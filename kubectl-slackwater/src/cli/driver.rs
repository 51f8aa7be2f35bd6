//! The arguments of the commands that run a command of the driver in one of its pods.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::cluster::{Cluster, Scope};
use crate::driver_pod::{self, DriverPod, may_run};
use crate::failure::Result;

/// Where the driver's pods are.
#[derive(Clone, Debug, Args)]
pub struct Pods {
    /// Namespace of the driver [default: that of its Helm release, otherwise all]
    #[arg(long, value_name = "NAME")]
    pub driver_namespace: Option<String>,
}

impl Pods {
    /// The pod on a node, in which the user may run commands.
    pub async fn on_node(&self, cluster: &Cluster, node: &str) -> Result<DriverPod> {
        let pod = driver_pod::get_on_node(cluster, &self.scope(cluster).await, node).await?;
        may_run(cluster, &pod).await?;
        Ok(pod)
    }

    /// A pod of the controller, in which the user may run commands.
    pub async fn of_controller(&self, cluster: &Cluster) -> Result<DriverPod> {
        let pod = driver_pod::get_of_controller(cluster, &self.scope(cluster).await).await?;
        may_run(cluster, &pod).await?;
        Ok(pod)
    }

    /// The namespaces in which they are searched for.
    pub async fn scope(&self, cluster: &Cluster) -> Scope {
        driver_pod::scope(cluster, self.driver_namespace.as_deref()).await
    }
}

/// Whether a command that changes something is run.
#[derive(Clone, Debug, Args)]
pub struct Confirmation {
    /// Run the command; without it, only what would be run is printed
    #[arg(long, short)]
    pub yes: bool,
    /// Print what would be run where, and end
    #[arg(long, conflicts_with = "yes")]
    pub dry_run: bool,
}

/// How the driver prints.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DriverFormat {
    /// Lines, as the driver prints them.
    #[default]
    Text,
    /// JSON.
    Json,
}

/// The format of the driver's output.
#[derive(Clone, Debug, Args)]
pub struct DriverOutput {
    /// Format of the output
    #[arg(long = "output", short = 'o', value_enum, default_value_t)]
    pub format: DriverFormat,
}

/// An examination of nodes.
#[derive(Clone, Debug, Args)]
pub struct DoctorArguments {
    /// The node [default: all with a pod or a pool of the driver]
    pub node: Option<String>,
    #[command(flatten)]
    pub print: DriverOutput,
    #[command(flatten)]
    pub pods: Pods,
}

/// A check of a file system.
#[derive(Clone, Debug, Args)]
pub struct CheckArguments {
    /// The claim, or the ID of the volume
    #[arg(value_name = "CLAIM|VOLUME-ID")]
    pub claim: String,
    /// Repair the errors that are found; this needs --yes
    #[arg(long)]
    pub repair: bool,
    #[command(flatten)]
    pub print: DriverOutput,
    #[command(flatten)]
    pub pods: Pods,
    #[command(flatten)]
    pub confirmed: Confirmation,
}

/// An archive of snapshots.
#[derive(Clone, Debug, Args)]
pub struct ExportArguments {
    /// The VolumeSnapshot, or the ID of the snapshot; several only if all are members of one group on one node
    #[arg(value_name = "SNAPSHOT|ID", required = true, value_parser = parse_operand)]
    pub snapshot: Vec<String>,
    /// An earlier snapshot of the same volume: only the differences to it are written (may be repeated,
    /// for the members of a group)
    #[arg(long, value_name = "SNAPSHOT|ID", value_parser = parse_operand)]
    pub base: Vec<String>,
    /// The file; it has this name only when it is complete [default: stdout]
    #[arg(long = "output", short = 'o', value_name = "FILE")]
    pub file: Option<PathBuf>,
    #[command(flatten)]
    pub pods: Pods,
}

/// Volumes of an archive.
#[derive(Clone, Debug, Args)]
pub struct ImportArguments {
    /// The node
    pub node: String,
    /// The archive [default: stdin]
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Name of the volume [default: that of the exported volume]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Text before the names of the exported volumes
    #[arg(long, value_name = "TEXT", conflicts_with = "name")]
    pub prefix: Option<String>,
    /// Pool in which the volumes are created [default: the name of their pool in the archive]
    #[arg(long, value_name = "POOL")]
    pub to_pool: Option<String>,
    /// Size of each volume, at least that of the exported one, such as 10Gi
    #[arg(long, value_name = "SIZE")]
    pub size: Option<String>,
    /// An archive of differences follows: the volumes stay incomplete, for an hour
    #[arg(long)]
    pub more: bool,
    #[command(flatten)]
    pub pods: Pods,
    #[command(flatten)]
    pub confirmed: Confirmation,
}

/// A volume with the content of something on a node.
#[derive(Clone, Debug, Args)]
pub struct ImportVolumeArguments {
    /// The node
    pub node: String,
    /// An image file, a block device or a directory that is not in use, as the driver's container sees it
    #[arg(long, value_name = "PATH", value_parser = parse_operand)]
    pub from: String,
    /// Name of the volume
    #[arg(long, value_name = "NAME")]
    pub name: String,
    /// Pool in which the volume is created
    #[arg(long, value_name = "POOL")]
    pub to_pool: String,
    /// Size of the volume, such as 10Gi [default: that of the content; needed for a directory]
    #[arg(long, value_name = "SIZE")]
    pub size: Option<String>,
    /// File system for the files of a directory
    #[arg(long, value_name = "FS")]
    pub fs_type: Option<String>,
    /// Directory with space for a copy of the files of a directory
    #[arg(long, value_name = "DIR")]
    pub scratch: Option<String>,
    /// Import the content as a raw device, whatever it is
    #[arg(long)]
    pub raw: bool,
    /// Also print a PersistentVolume and this claim as JSON, for `kubectl apply -f -`
    #[arg(long, value_name = "NAMESPACE/NAME", requires = "persistent_volume")]
    pub claim: Option<String>,
    /// Name of the PersistentVolume
    #[arg(long, value_name = "NAME", requires = "claim")]
    pub persistent_volume: Option<String>,
    /// StorageClass of both [default: slackwater]
    #[arg(long, value_name = "NAME", requires = "claim")]
    pub storage_class: Option<String>,
    #[command(flatten)]
    pub print: DriverOutput,
    #[command(flatten)]
    pub pods: Pods,
    #[command(flatten)]
    pub confirmed: Confirmation,
}

/// A word that the driver does not take for one of its options.
pub fn parse_operand(text: &str) -> std::result::Result<String, String> {
    match text.starts_with('-') {
        true => Err("it begins with -, as an option".into()),
        false => Ok(text.to_string()),
    }
}
