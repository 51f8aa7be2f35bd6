//! The command line: the options of all commands, and the arguments of each.

pub mod adopt;
pub mod completion;
pub mod driver;
pub mod options;
pub mod pools;

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Args, Parser, Subcommand};

use adopt::AdoptArguments;
use driver::{
    CheckArguments, DoctorArguments, ExportArguments, ImportArguments, ImportVolumeArguments, Pods,
    parse_operand,
};
use options::{parse_deadline, parse_time};

pub use options::{Change, Format, ListArguments, Output, Wait};
pub use pools::{PoolAdoptArguments, PoolCommand, PoolForgetArguments};

/// The whole command line.
#[derive(Debug, Parser)]
#[command(
    name = "kubectl-slackwater",
    bin_name = "kubectl slackwater",
    version,
    about = "Pools, volumes and snapshots of Slackwater in a cluster",
    disable_help_subcommand = true
)]
pub struct Cli {
    /// Which cluster, and as whom.
    #[command(flatten)]
    pub connection: Connection,
    /// What is to be done.
    #[command(subcommand)]
    pub command: Command,
}

/// Which cluster, and as whom.
#[derive(Debug, Args)]
pub struct Connection {
    /// Context of the kubeconfig
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,
    /// Kubeconfig file [default: KUBECONFIG, or ~/.kube/config]
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// User to impersonate
    #[arg(long = "as", global = true, value_name = "USER")]
    pub as_user: Option<String>,
    /// Group to impersonate (may be repeated)
    #[arg(long, global = true, value_name = "GROUP", requires = "as_user")]
    pub as_group: Vec<String>,
    /// Namespace [default: that of the context]
    #[arg(long, short, global = true, value_name = "NAME")]
    pub namespace: Option<String>,
    /// Name of the driver (`driverName` of the chart)
    #[arg(
        long,
        global = true,
        value_name = "NAME",
        default_value = "csi.slackwater.dev"
    )]
    pub driver_name: String,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// List pools, the fullest first
    Pools(ListArguments),
    /// List volumes with their claims, nodes and pools
    Volumes(ListArguments),
    /// List snapshots with the consistency level that they have reached
    Snapshots(ListArguments),
    /// List schedules of snapshots with their last and next cut
    Schedules(ListArguments),
    /// Have a schedule of snapshots executed now, or show what it will delete
    #[command(subcommand, disable_help_subcommand = true)]
    Schedule(ScheduleCommand),
    /// List volumes and snapshots that no object names, use them again, or have them deleted
    Orphans(OrphanArguments),
    /// List file systems that have been frozen for longer than a cut takes
    Frozen(ListArguments),
    /// Show where the volume of a claim is, and which pods use it
    Who {
        /// The claim
        claim: String,
        #[command(flatten)]
        output: Output,
    },
    /// Show pools, last cuts, moves and problems on one screen
    Status(ListArguments),
    /// Open the status page of the controller at a port of this machine
    Page {
        /// The port, at 127.0.0.1; 0 is any that is free
        #[arg(long, value_name = "PORT", default_value_t = 9830)]
        port: u16,
    },
    /// Report what nodes and their pools support, as the driver sees it there
    Doctor(DoctorArguments),
    /// Check the file system of a volume that no pod uses, on its node
    Check(CheckArguments),
    /// Write snapshots to stdout or a file, as an archive with checksums
    Export(ExportArguments),
    /// Create volumes on a node from an archive of stdin or a file
    Import(ImportArguments),
    /// Create a volume with the content of an image file, a block device or a directory of a node
    ImportVolume(ImportVolumeArguments),
    /// Mark a pool as lost, empty it, or let another node have it
    #[command(subcommand, disable_help_subcommand = true)]
    Pool(PoolCommand),
    /// Move the volume of a claim to another node or pool
    Move(MoveArguments),
    /// Restore a snapshot, or all members of a group snapshot, into new claims
    Restore(RestoreArguments),
    /// Give a claim, or all claims of a group snapshot, the content of a snapshot in place
    Revert(RevertArguments),
    /// Move a claim, with its volume, to another namespace
    Transfer(TransferArguments),
}

/// What is done with a schedule of snapshots.
#[derive(Debug, Subcommand)]
pub enum ScheduleCommand {
    /// Have it executed now, besides its own times
    Run {
        /// The SnapshotSchedule
        schedule: String,
        #[command(flatten)]
        change: Change,
        #[command(flatten)]
        wait: Wait,
    },
    /// List the sets that are not to be kept, and why
    Retention {
        /// The SnapshotSchedule
        schedule: String,
        #[command(flatten)]
        output: Output,
    },
}

/// What no object names, and what is to be used again or deleted of it.
#[derive(Clone, Debug, Args)]
pub struct OrphanArguments {
    #[command(flatten)]
    pub list: ListArguments,
    /// Have these deleted, a day later
    #[arg(long, value_name = "ID", num_args = 1.., conflicts_with = "watch", value_parser = parse_operand)]
    pub delete: Vec<String>,
    /// Keep these, which were to be deleted
    #[arg(long, value_name = "ID", num_args = 1.., conflicts_with = "watch")]
    pub keep: Vec<String>,
    /// List what no object names at this moment, or delete these snapshots at once, in a pod of the controller
    #[arg(long, conflicts_with_all = ["watch", "keep", "selector"])]
    pub now: bool,
    #[command(flatten)]
    pub adoption: AdoptArguments,
    #[command(flatten)]
    pub pods: Pods,
    #[command(flatten)]
    pub change: Change,
}

/// A move.
#[derive(Clone, Debug, Args)]
pub struct MoveArguments {
    /// The claim
    pub claim: String,
    #[command(flatten)]
    pub target: Target,
    /// When the volume is moved: when its pods have ended, or now, with eviction of its pods
    #[arg(long, value_name = "WHEN", default_value = "drained", value_parser = ["drained", "now"])]
    pub when: String,
    /// How long the old volume is kept after the move, such as 30m or 7d
    #[arg(long, value_name = "TIME", default_value = "24h")]
    pub keep_source: String,
    #[command(flatten)]
    pub change: Change,
    #[command(flatten)]
    pub wait: Wait,
}

/// A restore.
#[derive(Clone, Debug, Args)]
pub struct RestoreArguments {
    /// The VolumeSnapshot or VolumeGroupSnapshot, with its kind (`volumesnapshot/NAME`) if both exist;
    /// snapshotschedule/NAME is what this schedule has taken last; if the namespace is gone,
    /// `volumesnapshotcontent/NAME` or `volumegroupsnapshotcontent/NAME`, or the ID instead of the name
    #[arg(value_name = "SNAPSHOT|GROUP")]
    pub source: String,
    /// Name of the new claim of a content, where that of the old claim is not known; for a group, once for
    /// each member
    #[arg(
        long = "claim",
        value_name = "[CONTENT=]NAME",
        requires = "to_namespace"
    )]
    pub claims: Vec<String>,
    /// Create the claims that this StatefulSet expects; with --to-namespace, it is one of that namespace
    #[arg(long, value_name = "NAME")]
    pub statefulset: Option<String>,
    /// Add `-TEXT` to the names of claims; with --statefulset, to that of the StatefulSet
    #[arg(long, value_name = "TEXT")]
    pub suffix: Option<String>,
    /// Class of the new claims [default: that of the old claim or of the StatefulSet, or the default class]
    #[arg(long, value_name = "NAME")]
    pub storage_class: Option<String>,
    /// Create the claims in this namespace: under other names first, from which they are transferred
    #[arg(long, value_name = "NAME", conflicts_with = "discard")]
    pub to_namespace: Option<String>,
    #[command(flatten)]
    pub check: Check,
    #[command(flatten)]
    pub output: Output,
    #[command(flatten)]
    pub change: Change,
    #[command(flatten)]
    pub wait: Wait,
}

/// A check of restored volumes.
#[derive(Clone, Debug, Args)]
pub struct Check {
    /// Run this command, with `sh -c`, in a pod that has the volumes, read-only, below /restored; with
    /// --to-namespace the restore is completed only if it succeeds
    #[arg(long, value_name = "COMMAND", requires = "verify_image")]
    pub verify: Option<String>,
    /// Image of that pod
    #[arg(long, value_name = "IMAGE", requires = "verify")]
    pub verify_image: Option<String>,
    /// Numeric UID for the command
    #[arg(long, value_name = "UID", requires = "verify")]
    pub verify_user: Option<u32>,
    /// Delete the claims after the check, which may write to them
    #[arg(long, requires = "verify")]
    pub discard: bool,
}

/// A revert.
#[derive(Clone, Debug, Args)]
#[command(group = ArgGroup::new("reverted").required(true).args(["claim", "group"]))]
pub struct RevertArguments {
    /// The claim
    #[arg(requires = "to")]
    pub claim: Option<String>,
    /// The VolumeSnapshot of this claim whose content it gets
    #[arg(long, value_name = "SNAPSHOT", requires = "claim")]
    pub to: Option<String>,
    /// Revert the claims of all members of this VolumeGroupSnapshot
    #[arg(long, value_name = "GROUPSNAPSHOT")]
    pub group: Option<String>,
    /// Keep the present content in VolumeSnapshots
    #[arg(long)]
    pub keep_old: bool,
    /// What has not begun within this time fails, for example because pods use a claim
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = parse_deadline)]
    pub deadline: String,
    #[command(flatten)]
    pub change: Change,
    #[command(flatten)]
    pub wait: Wait,
}

/// A claim to another namespace.
#[derive(Clone, Debug, Args)]
pub struct TransferArguments {
    /// The claim
    pub claim: String,
    /// The namespace
    #[arg(long, value_name = "NAME", required_unless_present = "undo")]
    pub to_namespace: Option<String>,
    /// Name of the claim there [default: the same]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Give the volume back to the claim, as long as the new claim is not bound to it
    #[arg(long, conflicts_with_all = ["to_namespace", "name"])]
    pub undo: bool,
    /// Time after which the program ends (`90s`, `10m`, `2h`); the same command continues
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub timeout: Option<Duration>,
    #[command(flatten)]
    pub change: Change,
}

/// Where a volume is moved to; all that is given must be true of its new pool.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = true)]
pub struct Target {
    /// The node
    #[arg(long, value_name = "NODE")]
    pub to_node: Option<String>,
    /// ID or name of the pool
    #[arg(long, value_name = "POOL")]
    pub to_pool: Option<String>,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory;

    use super::*;

    /// The long options of a command and of those below it.
    fn options(command: &clap::Command) -> BTreeSet<String> {
        let own = command
            .get_arguments()
            .filter_map(|argument| argument.get_long());
        let own = own.map(|name| format!("--{name}"));
        let below = command.get_subcommands().flat_map(options);
        own.chain(below).collect()
    }

    /// Names of commands, also of those below them.
    fn commands(command: &clap::Command) -> Vec<String> {
        let each = command
            .get_subcommands()
            .flat_map(|one| match one.has_subcommands() {
                true => {
                    let below = commands(one).into_iter();
                    below
                        .map(|name| format!("{} {name}", one.get_name()))
                        .collect()
                }
                false => vec![one.get_name().to_string()],
            });
        each.collect()
    }

    #[test]
    fn the_page_has_all_options_and_commands_and_no_others() {
        Cli::command().debug_assert();
        let page = include_str!("../../docs/plugin.md");
        let code = page.split('`').skip(1).step_by(2);
        let words = code.flat_map(|code| code.split([' ', '=']));
        let named: BTreeSet<_> = words
            .filter(|word| word.starts_with("--"))
            .map(str::to_string)
            .collect();
        assert_eq!(named, options(&Cli::command()));
        let all = options(&Cli::command());
        let of_kubectl = ["kubectl scale", "kubectl patch", "kubectl label"];
        let page_of_restores = include_str!("../../docs/restore.md");
        let lines = page_of_restores.lines();
        for line in lines.filter(|line| !of_kubectl.iter().any(|it| line.contains(it))) {
            let is_option = |word: &&str| word.starts_with("--") && !word.starts_with("---");
            let is_end = |c: char| !(c.is_ascii_lowercase() || c == '-');
            for word in line.split(is_end).filter(is_option) {
                assert!(all.contains(word), "docs/restore.md: {word}");
            }
        }
        for command in commands(&Cli::command()) {
            let row = |end: &str| page.contains(&format!("\n| `{command}{end}"));
            assert!(
                row("`") || row(" "),
                "docs/plugin.md has no row of {command}"
            );
        }
    }
}
