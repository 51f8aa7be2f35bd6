//! The command line: arguments and exit codes.
//!
//! 0 means done (or stopped by a signal), 64 an invalid command line or configuration, 1 any other
//! failure. An error is reported once, on stderr, in one line.

mod adopt;
mod certificates;
mod check;
mod doctor;
mod enrol;
mod export;
mod frozen;
mod guard;
mod hand_over;
mod import_image;
mod orphans;
mod pool;
mod populators;
mod print;
mod router;
mod serve;
mod snapshots;
mod volumes;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, Parser, Subcommand};
use tokio::runtime::Builder;

use crate::backend::place::image::own_folders;
use crate::config::{self, BadConfig, DriverName, Endpoint, Folder, Given};
use crate::cut::guard::GuardClient;
use crate::demo;
use crate::error;
use crate::fault;
use crate::host::Host;
use crate::host::linux::LinuxHost;
use crate::model::{PoolDefinition, ThinPoolName};

/// The command line was parsed, but contains invalid values: EX_USAGE of sysexits.h.
const BAD_CONFIG: u8 = 64;

#[derive(Debug, Parser)]
#[command(
    name = "slackwater",
    version,
    about = "A CSI driver for the local disks of a node",
    disable_help_subcommand = true
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve CSI until SIGTERM or SIGINT, as a single node, or as a node or the controller of a cluster
    Serve(Box<ServeArgs>),
    /// Create, adopt, forget and list pools
    #[command(subcommand, disable_help_subcommand = true)]
    Pool(PoolCommand),
    /// Demonstrate all features on a temporary pool, in seconds
    Demo {
        /// Keep the driver and its volumes running until Ctrl-C
        #[arg(long)]
        keep: bool,
        /// Directory in which the demo creates its own directory [default: the directory for temporary files]
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
        /// Use a thin pool of LVM that was never used, and give it back
        #[arg(long, value_name = "lvm:VG/POOL", value_parser = thin_pool)]
        pool: Option<ThinPoolName>,
    },
    /// Hook program of the demo
    #[command(hide = true)]
    DemoHook {
        /// Directory that the demo's writers watch
        folder: PathBuf,
        /// Seconds after which it releases them by itself
        seconds: u64,
    },
    /// Report what this host and its pools support; exit 1 if a pool cannot work
    Doctor {
        #[command(flatten)]
        place: Place,
        /// Directory below which the driver will mount volumes (may be repeated) [default: /var/lib/kubelet]
        #[arg(long, value_name = "DIR")]
        allowed_path: Vec<Folder>,
        /// The driver's state directory, which holds its freeze journal [default: /run/slackwater/state]
        #[arg(long, value_name = "DIR")]
        state_dir: Option<Folder>,
    },
    /// List the file systems that are frozen for a cut, with owner and deadline, or thaw them
    Frozen {
        /// Thaw all listed file systems; cuts that are in progress fail
        #[arg(long)]
        thaw: bool,
        /// Print JSON
        #[arg(long)]
        json: bool,
        /// The driver's state directory [default: /run/slackwater/state]
        #[arg(long, value_name = "DIR")]
        state_dir: Option<Folder>,
    },
    /// Run the freeze guard, which freezes file systems on behalf of the driver and thaws them even
    /// if the driver dies
    Guard {
        /// Unix socket on which it listens for the driver
        #[arg(long, value_name = "PATH")]
        socket: Folder,
        /// The driver's state directory
        #[arg(long, value_name = "DIR")]
        state_dir: Folder,
        /// Stdin is a pipe from the driver that started it: exit when it closes
        #[arg(long, hide = true)]
        with_parent: bool,
    },
    /// Create certificates for the controller and the nodes of a cluster
    Certificates(certificates::Arguments),
    /// Request and renew this node's certificate, as a sidecar of its driver, in a cluster whose
    /// controller signs them
    Enrol(enrol::Arguments),
    /// Write a snapshot of a node's driver to stdout, as an archive with checksums
    Export(export::ExportArguments),
    /// Create volumes on a node from an archive on stdin
    Import(export::ImportArguments),
    /// Run the controller that fills the volumes of claims that name a data source
    Populators(populators::Arguments),
    /// Delete snapshots that no object of a cluster owns
    #[command(subcommand, disable_help_subcommand = true)]
    Snapshots(SnapshotsCommand),
    /// List the volumes of pools, also while a driver is running; check or import a volume
    #[command(
        alias = "volume",
        args_conflicts_with_subcommands = true,
        disable_help_subcommand = true
    )]
    Volumes {
        #[command(subcommand)]
        command: Option<VolumesCommand>,
        #[command(flatten)]
        place: Place,
        /// List volumes and snapshots of the driver at --endpoint that no object of the cluster
        /// references; the cluster is that of KUBECONFIG or of this pod
        #[arg(long, conflicts_with_all = ["pool", "node_record"])]
        orphans: bool,
        /// With --orphans: the CSI socket of the controller [env: CSI_ENDPOINT]
        #[arg(long, value_name = "ENDPOINT", requires = "orphans")]
        endpoint: Option<Endpoint>,
        /// With --orphans: name that the driver at --endpoint must have [default: any name]
        #[arg(long, value_name = "NAME", requires = "orphans")]
        driver_name: Option<DriverName>,
    },
}

#[derive(Debug, Subcommand)]
enum SnapshotsCommand {
    /// Delete snapshots, also members of groups, that no object owns in the cluster of KUBECONFIG
    /// or of this pod; without --yes, only show what would be deleted
    Delete(Box<snapshots::Arguments>),
}

#[derive(Debug, Subcommand)]
enum VolumesCommand {
    /// Check the file system of an unused volume, through the running driver at --endpoint, or
    /// directly on pools whose driver is not running
    Check(Box<check::Arguments>),
    /// Create a volume with the content of an image file, a block device, a directory or stdin; without --yes,
    /// only show what would be imported
    Import(Box<import_image::Arguments>),
}

#[derive(Debug, Args)]
struct ServeArgs {
    /// TOML file with keys named as these flags; a flag overrides the file
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    given: Given,
}

#[derive(Debug, Subcommand)]
enum PoolCommand {
    /// Create a pool in an empty directory, or in a thin pool of LVM that was never used
    Init {
        /// NAME=file:/path or NAME=lvm:VG/POOL
        #[arg(value_name = "NAME=file:/path|NAME=lvm:VG/POOL")]
        pool: PoolDefinition,
        #[command(flatten)]
        node: Node,
    },
    /// Transfer a pool of another machine to this one; with --cluster, update its PersistentVolumes
    Adopt {
        /// NAME=file:/path, NAME=lvm:VG/POOL, or the name of a known pool; with --cluster its UUID, name
        /// or NODE/NAME
        #[arg(value_name = "NAME[=file:/path|=lvm:VG/POOL]")]
        pool: String,
        /// Only show what would be changed
        #[arg(long)]
        dry_run: bool,
        /// Update the PersistentVolumes of a pool that its node has adopted, in the cluster of
        /// KUBECONFIG or of this pod; without --yes, only show what would be changed
        #[arg(long, conflicts_with_all = ["config", "node_record"])]
        cluster: bool,
        /// Apply the changes
        #[arg(long, requires = "cluster", conflicts_with = "dry_run")]
        yes: bool,
        /// With --cluster: the CSI socket of the controller, from which the driver's name is read
        /// [env: CSI_ENDPOINT]
        #[arg(long, value_name = "ENDPOINT", requires = "cluster")]
        endpoint: Option<Endpoint>,
        /// With --cluster: name of the driver [default: from the driver at --endpoint, else from the
        /// pool's object]
        #[arg(long, value_name = "NAME", requires = "cluster")]
        driver_name: Option<DriverName>,
        #[command(flatten)]
        node: Node,
    },
    /// Assign a pool of a cluster to another node after its disk was moved there, if the previous
    /// node cannot be reached or no longer has the pool
    HandOver {
        /// UUID or name of the pool, or NODE/NAME
        #[arg(value_name = "POOL")]
        pool: String,
        /// Name of the Node object
        #[arg(long, value_name = "NODE")]
        to: String,
        /// The CSI socket of the controller, from which the driver's name is read [env: CSI_ENDPOINT]
        #[arg(long, value_name = "ENDPOINT")]
        endpoint: Option<Endpoint>,
        /// Name of the driver [default: from the driver at --endpoint, else from the pool's object]
        #[arg(long, value_name = "NAME")]
        driver_name: Option<DriverName>,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Release a pool of LVM for maintenance: unmount its records and remove their device, so that
    /// LVM can deactivate the thin pool. The driver must not serve it
    Release {
        /// NAME of a pool of this machine, or NAME=lvm:VG/POOL
        #[arg(value_name = "NAME|NAME=lvm:VG/POOL")]
        pool: String,
        #[command(flatten)]
        node: Node,
    },
    /// Forget a pool that is permanently gone: its volumes count as deleted
    Forget {
        /// Name or ID of a pool that this machine has or had
        #[arg(value_name = "NAME|ID")]
        pool: String,
        #[command(flatten)]
        node: Node,
    },
    /// List the configured pools and the pools that this machine had
    List {
        #[command(flatten)]
        place: Place,
    },
}

/// Options of the commands that act on pools.
#[derive(Debug, Args)]
struct Node {
    /// The driver's configuration file
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Record of this machine's pools [default: /var/lib/slackwater/node.json]
    #[arg(long, value_name = "FILE")]
    node_record: Option<Folder>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Like [`Node`], with pools on the command line.
#[derive(Debug, Args)]
struct Place {
    #[command(flatten)]
    node: Node,
    /// A pool: NAME=file:/path or NAME=lvm:VG/POOL (may be repeated)
    #[arg(long, value_name = "POOL")]
    pool: Vec<PoolDefinition>,
}

impl Node {
    /// Adds the values of the configuration file where no flag was given.
    fn with_file(self, flags: Given) -> Result<PoolArguments, Failure> {
        let flags = Given {
            node_record: self.node_record,
            ..flags
        };
        let given = flags.over_file(self.config.as_deref())?;
        crate::model::pool::check_together(&given.pool)
            .map_err(|error| BadConfig(format!("--pool: {error}")))?;
        Ok(PoolArguments {
            pools: given.pool,
            node_record: config::folder(given.node_record, config::NODE_RECORD),
            allowed_paths: config::allowed_paths(given.allowed_path),
            state_dir: config::folder(given.state_dir, config::STATE_DIR),
            json: self.json,
        })
    }
}

impl Place {
    fn with_file(self) -> Result<PoolArguments, Failure> {
        self.with(Vec::new(), None)
    }

    fn with(
        self,
        allowed_path: Vec<Folder>,
        state_dir: Option<Folder>,
    ) -> Result<PoolArguments, Failure> {
        self.node.with_file(Given {
            pool: self.pool,
            allowed_path,
            state_dir,
            ..Given::default()
        })
    }
}

/// The validated arguments of a command that acts on pools.
#[derive(Debug)]
struct PoolArguments {
    pools: Vec<PoolDefinition>,
    node_record: PathBuf,
    allowed_paths: Vec<PathBuf>,
    state_dir: PathBuf,
    json: bool,
}

/// Why a command failed.
#[derive(Debug)]
enum Failure {
    /// Exit code 64.
    Config(BadConfig),
    /// Exit code 1.
    Run(Box<dyn std::error::Error + Send + Sync>),
}

impl Failure {
    fn run(error: impl std::error::Error + Send + Sync + 'static) -> Failure {
        Failure::Run(Box::new(error))
    }
}

impl From<BadConfig> for Failure {
    fn from(bad: BadConfig) -> Failure {
        Failure::Config(bad)
    }
}

impl From<error::Error> for Failure {
    fn from(error: error::Error) -> Failure {
        Failure::run(error)
    }
}

/// Runs the program.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    if let Err(error) = fault::check() {
        eprintln!("slackwater: {}", error::chain(&error));
        return ExitCode::from(BAD_CONFIG);
    }
    let ending = match cli.command {
        Command::Serve(args) => serve::serve(args.config.as_deref(), args.given),
        Command::Pool(command) => pool::run(command),
        Command::DemoHook { folder, seconds } => demo_hook(&folder, seconds),
        Command::Demo { keep, dir, pool } => demo(&demo::Options { keep, dir, pool }),
        Command::Doctor {
            place,
            allowed_path,
            state_dir,
        } => place.with(allowed_path, state_dir).and_then(doctor::run),
        Command::Frozen {
            thaw,
            json,
            state_dir,
        } => frozen::run(&config::folder(state_dir, config::STATE_DIR), thaw, json),
        Command::Guard {
            socket,
            state_dir,
            with_parent,
        } => guard::run(&socket.0, &state_dir.0, with_parent),
        Command::Certificates(arguments) => certificates::run(&arguments),
        Command::Enrol(arguments) => enrol::run(arguments),
        Command::Export(arguments) => export::export(arguments),
        Command::Import(arguments) => export::import(arguments),
        Command::Populators(arguments) => populators::run(arguments),
        Command::Snapshots(SnapshotsCommand::Delete(arguments)) => snapshots::delete(&arguments),
        Command::Volumes {
            command: Some(VolumesCommand::Check(arguments)),
            ..
        } => check::run(*arguments),
        Command::Volumes {
            command: Some(VolumesCommand::Import(arguments)),
            ..
        } => import_image::run(*arguments),
        Command::Volumes {
            place,
            orphans: true,
            endpoint,
            driver_name,
            command: None,
        } => orphans::run(&place, endpoint, driver_name),
        Command::Volumes { place, .. } => volumes::run(place),
    };
    match ending {
        Ok(code) => code,
        Err(Failure::Config(bad)) => {
            eprintln!("slackwater: {bad}");
            ExitCode::from(BAD_CONFIG)
        }
        Err(Failure::Run(error)) => {
            eprintln!("slackwater: {}", error::chain(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

fn thin_pool(place: &str) -> Result<ThinPoolName, String> {
    let name = place.strip_prefix("lvm:").ok_or("give lvm:VG/POOL")?;
    name.parse()
}

fn demo(options: &demo::Options) -> Result<ExitCode, Failure> {
    demo::run(options).map(status).map_err(Failure::run)
}

/// The exit status of a command that has found a problem, or none.
fn status(is_well: bool) -> ExitCode {
    match is_well {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// Runs a command that waits for other programs on the network.
fn block_on<T, E>(work: impl Future<Output = Result<T, E>>) -> Result<T, Failure>
where
    Failure: From<E>,
{
    let runtime = Builder::new_current_thread().enable_all().build();
    Ok(runtime.map_err(Failure::run)?.block_on(work)?)
}

/// Prints help and version on stdout, and any other message as one sentence on stderr.
fn usage(error: &clap::Error) -> ExitCode {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            print::line(error.render().to_string().trim_end());
            return ExitCode::SUCCESS;
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => {
            eprintln!("slackwater: no command given; see slackwater --help");
        }
        _ => eprintln!("slackwater: {}", sentence(error)),
    }
    ExitCode::from(BAD_CONFIG)
}

/// Shortens clap's paragraph to a sentence, and removes its frame from the messages of this
/// program's own parsers.
fn sentence(error: &clap::Error) -> String {
    let argument = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(argument)) => argument.as_str(),
        _ => "",
    };
    let flag = argument.split(' ').next().unwrap_or_default();
    match std::error::Error::source(error) {
        Some(cause) if flag.starts_with("--") => config::one_line(&format!("{flag}: {cause}")),
        Some(cause) => config::one_line(&cause.to_string()),
        None => {
            let text = error.render().to_string();
            let paragraph = config::one_line(text.split("\n\n").next().unwrap_or_default());
            let plain = paragraph.strip_prefix("error: ").unwrap_or(&paragraph);
            plain.to_string()
        }
    }
}

fn demo_hook(folder: &std::path::Path, seconds: u64) -> Result<ExitCode, Failure> {
    let held = demo::hook(folder, std::time::Duration::from_secs(seconds));
    held.map(|()| ExitCode::SUCCESS).map_err(Failure::run)
}

/// The kernel of this machine. Mounts are permitted below these directories, and in those of the
/// pools' images.
fn real_host(allowed: &[PathBuf], pools: &[PoolDefinition]) -> Arc<dyn Host> {
    Arc::new(kernel(allowed, pools))
}

/// Like [`real_host`], also with the directory in which the guard's sweep mounts hidden file
/// systems.
fn host_with_guard(
    allowed: &[PathBuf],
    pools: &[PoolDefinition],
    state_dir: &Path,
) -> Arc<dyn Host> {
    let folder = GuardClient::private_folder(state_dir);
    Arc::new(kernel(allowed, pools).with_own_folder(folder))
}

fn kernel(allowed: &[PathBuf], pools: &[PoolDefinition]) -> LinuxHost {
    let own = own_folders(pools).into_iter();
    own.fold(LinuxHost::new(allowed.to_vec()), LinuxHost::with_own_folder)
}
