//! `kubectl slackwater`: shows what objects of a cluster say about Slackwater's pools, volumes and
//! snapshots, and changes objects, with the rights of its user.
//!
//! It is a program of its own that is linked with nothing of the driver ([ADR 0052]). It reads and
//! writes Kubernetes objects; what works on the disk of a node is run in the driver's container there
//! ([ADR 0064]). docs/plugin.md has the verbs of each command.
//!
//! [ADR 0052]: ../../docs/adr/0052-the-plugin-reads-objects-only.md
//! [ADR 0064]: ../../docs/adr/0064-the-plugin-runs-commands-of-the-driver-in-its-pods.md

pub mod adopt;
pub mod change;
pub mod cli;
pub mod cluster;
pub mod complete;
pub mod copies;
pub mod cuts;
pub mod driver_pod;
pub mod exec;
pub mod export;
pub mod failure;
pub mod freeze;
pub mod frozen;
pub mod growth;
pub mod listing;
pub mod model;
pub mod object;
pub mod on_node;
pub mod orphans;
pub mod page;
pub mod pod_arguments;
pub mod pool_change;
pub mod pool_follow;
pub mod pool_object;
pub mod pool_request;
pub mod pools;
pub mod restore;
pub mod retention;
pub mod revert;
pub mod schedule_run;
pub mod schedules;
pub mod snapshots;
pub mod status;
pub mod text;
pub mod transfer;
pub mod version;
pub mod volume_move;
pub mod volumes;
pub mod watch;
pub mod who;
pub mod work;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

use cli::{Cli, Command, ScheduleCommand};
use cluster::Cluster;
use failure::{Failure, Result};

/// Runs the program, and returns its exit code.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let arguments: Vec<OsString> = arguments.collect();
    if let Some((program, words)) = arguments.split_first()
        && complete::is_wanted(Path::new(program))
    {
        return candidates(words);
    }
    let done = match Cli::try_parse_from(arguments) {
        Ok(cli) => run(cli),
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::DisplayHelp | ErrorKind::DisplayVersion
            ) =>
        {
            // Nothing is left to do if the reader is gone.
            let _ = error.print();
            return ExitCode::SUCCESS;
        }
        Err(error) => Err(Failure::usage(error.to_string())),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let message = failure.message.trim_end();
            let message = message.strip_prefix("error: ").unwrap_or(message);
            eprintln!("kubectl-slackwater: {}", text::escaped_lines(message));
            ExitCode::from(failure.code)
        }
    }
}

/// Prints what completes the command line. A failure has no candidates, and no message: the user is
/// typing.
fn candidates(words: &[OsString]) -> ExitCode {
    let words: Vec<String> = words
        .iter()
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    if let Ok(runtime) = runtime() {
        runtime.block_on(complete::run(&words));
    }
    ExitCode::SUCCESS
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    runtime.map_err(|error| Failure::failed(format!("starting the runtime: {error}")))
}

fn run(cli: Cli) -> Result<()> {
    runtime()?.block_on(async {
        let cluster = Cluster::connect(&cli.connection).await?;
        version::compare(&cluster).await;
        let namespace = cli.connection.namespace.as_deref();
        let done = execute(&cluster, namespace, cli.command).await;
        // Those that the command has not shown with its result.
        for note in listing::notes(&cluster.take_notes()) {
            eprintln!("{note}");
        }
        done
    })
}

/// Executes a command, with the namespace of `-n` if it is given.
async fn execute(cluster: &Cluster, namespace: Option<&str>, command: Command) -> Result<()> {
    match command {
        Command::Pools(arguments) => {
            watch::show(cluster, &arguments, &pools::KINDS, pools::listing).await
        }
        Command::Volumes(arguments) => {
            watch::show(cluster, &arguments, &volumes::KINDS, volumes::listing).await
        }
        Command::Snapshots(arguments) => {
            watch::show(cluster, &arguments, &snapshots::KINDS, snapshots::listing).await
        }
        Command::Schedules(arguments) => {
            watch::show(cluster, &arguments, &schedules::KINDS, schedules::listing).await
        }
        Command::Schedule(ScheduleCommand::Run {
            schedule,
            change,
            wait,
        }) => schedule_run::run(cluster, &schedule, &change, &wait).await,
        Command::Schedule(ScheduleCommand::Retention { schedule, output }) => {
            retention::run(cluster, &schedule, output.format).await
        }
        Command::Frozen(arguments) => {
            watch::show(cluster, &arguments, &frozen::KINDS, frozen::listing).await
        }
        Command::Orphans(arguments) => orphans::run(cluster, &arguments).await,
        Command::Who { claim, output } => who::run(cluster, &claim, output.format).await,
        Command::Status(arguments) => status::run(cluster, &arguments).await,
        Command::Page { port } => page::run(cluster, namespace, port).await,
        Command::Doctor(arguments) => on_node::doctor(cluster, &arguments).await,
        Command::Check(arguments) => on_node::check(cluster, &arguments).await,
        Command::Export(arguments) => export::export(cluster, &arguments).await,
        Command::Import(arguments) => export::import(cluster, &arguments).await,
        Command::ImportVolume(arguments) => on_node::import_volume(cluster, &arguments).await,
        Command::Pool(command) => pool_change::run(cluster, command).await,
        Command::Move(arguments) => volume_move::run(cluster, &arguments).await,
        Command::Restore(arguments) => restore::run(cluster, &arguments).await,
        Command::Revert(arguments) => revert::run(cluster, &arguments).await,
        Command::Transfer(arguments) => transfer::run(cluster, &arguments).await,
    }
}
