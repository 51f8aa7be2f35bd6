//! `kubectl slackwater`: shows Slackwater's pools, volumes and snapshots as the objects of a cluster
//! record them, and changes objects, with the permissions of its user.
//!
//! It is a program of its own that is linked with nothing of the driver ([ADR 0052]). It reads and
//! writes Kubernetes objects; what works on the disk of a node is run in the driver's container there
//! ([ADR 0064]). docs/plugin.md has the verbs of each command.
//!
//! | module | contents |
//! |---|---|
//! | [`cli`] | the command line, with the arguments of each command, and its completion in shells |
//! | [`cluster`] | the connection to the API server; kinds of objects and their fields |
//! | [`change`] | what all commands that change objects share: permissions, plans, requests, progress |
//! | [`driver_pod`] | the pods of the driver, and commands of the driver that are run in them |
//! | [`model`] | pools, volumes, snapshots and moves, joined from objects |
//! | [`listing`], [`text`] | output: tables, JSON, `--watch`; sizes, times, and text that is escaped |
//! | [`failure`] | why a command failed, and the exit codes |
//! | [`pools`], [`volumes`], [`snapshots`], [`schedules`], [`orphans`] | the commands about these |
//! | [`restore`], [`transfer`] | `restore` and `transfer` |
//! | [`status`], [`status_page`], [`doctor`] | `status`, `page` and `doctor` |
//!
//! [ADR 0052]: ../../docs/adr/0052-the-plugin-reads-objects-only.md
//! [ADR 0064]: ../../docs/adr/0064-the-plugin-runs-commands-of-the-driver-in-its-pods.md

pub mod change;
pub mod cli;
pub mod cluster;
pub mod doctor;
pub mod driver_pod;
pub mod failure;
pub mod listing;
pub mod model;
pub mod orphans;
pub mod pools;
pub mod restore;
pub mod schedules;
pub mod snapshots;
pub mod status;
pub mod status_page;
pub mod text;
pub mod transfer;
pub mod volumes;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

use cli::{Cli, Command, completion};
use cluster::{Cluster, driver_version};
use failure::{Failure, Result};
use listing::watch;

/// Runs the program, and returns its exit code.
pub fn main(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let arguments: Vec<OsString> = arguments.collect();
    if let Some((program, words)) = arguments.split_first()
        && completion::is_requested(Path::new(program))
    {
        return print_candidates(words);
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
fn print_candidates(words: &[OsString]) -> ExitCode {
    let words: Vec<String> = words
        .iter()
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    if let Ok(runtime) = runtime() {
        runtime.block_on(completion::run(&words));
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
        driver_version::compare(&cluster).await;
        let namespace = cli.connection.namespace.as_deref();
        let done = execute(&cluster, namespace, cli.command).await;
        // Those that the command has not shown with its result.
        for note in listing::note_lines(&cluster.take_notes()) {
            eprintln!("{note}");
        }
        done
    })
}

/// Executes a command, with the namespace of `-n` if it is given.
async fn execute(cluster: &Cluster, namespace: Option<&str>, command: Command) -> Result<()> {
    match command {
        Command::Pools(arguments) => {
            watch::show(
                cluster,
                &arguments,
                &pools::list::KINDS,
                pools::list::listing,
            )
            .await
        }
        Command::Volumes(arguments) => {
            watch::show(
                cluster,
                &arguments,
                &volumes::list::KINDS,
                volumes::list::listing,
            )
            .await
        }
        Command::Snapshots(arguments) => {
            watch::show(
                cluster,
                &arguments,
                &snapshots::list::KINDS,
                snapshots::list::listing,
            )
            .await
        }
        Command::Schedules(arguments) => {
            watch::show(
                cluster,
                &arguments,
                &schedules::list::KINDS,
                schedules::list::listing,
            )
            .await
        }
        Command::Frozen(arguments) => {
            watch::show(
                cluster,
                &arguments,
                &volumes::frozen::KINDS,
                volumes::frozen::listing,
            )
            .await
        }
        Command::Status(arguments) => status::run(cluster, &arguments).await,
        Command::Page { port } => status_page::run(cluster, namespace, port).await,
        Command::Doctor(arguments) => doctor::run(cluster, &arguments).await,
        Command::Pool(command) => pools::run(cluster, command).await,
        Command::Schedule(command) => schedules::run(cluster, command).await,
        Command::Who { claim, output } => {
            volumes::claim_usage::run(cluster, &claim, output.format).await
        }
        Command::Check(arguments) => volumes::check::run(cluster, &arguments).await,
        Command::ImportVolume(arguments) => volumes::import::run(cluster, &arguments).await,
        Command::Move(arguments) => volumes::move_volume::run(cluster, &arguments).await,
        Command::Orphans(arguments) => orphans::run(cluster, &arguments).await,
        Command::Export(arguments) => snapshots::archive::export(cluster, &arguments).await,
        Command::Import(arguments) => snapshots::archive::import(cluster, &arguments).await,
        Command::Revert(arguments) => snapshots::revert::run(cluster, &arguments).await,
        Command::Restore(arguments) => restore::run(cluster, &arguments).await,
        Command::Transfer(arguments) => transfer::run(cluster, &arguments).await,
    }
}
