//! Commands of the driver that are run in the container of one of its pods: their command line, the
//! confirmation of the user, and their exit code.

use std::io;

use super::DriverPod;
use super::exec::{self, join_words};
use crate::change::print_lines;
use crate::cli::driver::Confirmation;
use crate::cluster::Cluster;
use crate::cluster::object::{self, pool_of};
use crate::failure::{Failure, Result};
use crate::model::Pool;

/// A command line of the driver: its name, and the options of the driver itself.
pub fn command_line(pod: &DriverPod, words: &[&str], options: &[&str]) -> Vec<String> {
    let program = ["slackwater"].iter().chain(words).map(ToString::to_string);
    program.chain(pod.options(options)).collect()
}

/// Runs a command whose output is that of the program.
pub async fn run_and_print(cluster: &Cluster, pod: &DriverPod, words: &[String]) -> Result<()> {
    let code = exec::run(cluster, pod, words, &mut io::stdout(), None).await?;
    check_exit_code(pod, words, code)
}

/// Runs a command of the driver that prints what it would do, and changes nothing without its `--yes`.
pub async fn run_with_plan(
    cluster: &Cluster,
    pod: &DriverPod,
    mut words: Vec<String>,
    (yes, dry_run): (bool, bool),
) -> Result<()> {
    words.extend((yes && !dry_run).then(|| "--yes".to_string()));
    run_and_print(cluster, pod, &words).await?;
    match yes || dry_run {
        true => Ok(()),
        false => Err(Failure {
            message: "nothing was changed; add --yes to do this".into(),
            ..Failure::unconfirmed()
        }),
    }
}

/// The exit code of the driver is that of the program.
pub fn check_exit_code(pod: &DriverPod, words: &[String], code: u8) -> Result<()> {
    match code {
        0 => Ok(()),
        code => Err(Failure {
            code,
            ..Failure::failed(format!(
                "{} in {} has ended with exit code {code}",
                join_words(words),
                pod.title()
            ))
        }),
    }
}

/// Prints what will be run, if it changes something. Returns whether it is to be run.
pub fn confirm(confirmed: &Confirmation, pod: &DriverPod, words: &[String]) -> Result<bool> {
    print_lines(&format!(
        "In the container {} of {}, this will be run: {}",
        pod.container,
        pod.title(),
        join_words(words)
    ));
    match (confirmed.dry_run, confirmed.yes) {
        (true, _) => Ok(false),
        (false, true) => Ok(true),
        (false, false) => Err(Failure {
            message: "nothing was run; add --yes to run this".into(),
            ..Failure::unconfirmed()
        }),
    }
}

/// The node of a volume or a snapshot, by its ID.
pub async fn node_of(cluster: &Cluster, id: &str) -> Result<String> {
    let Some(pool) = pool_of(id) else {
        return Err(Failure::failed(format!(
            "{id} is no ID of a volume or a snapshot of {}",
            cluster.driver
        )));
    };
    let pool = Pool::of(&cluster.get(&object::POOL, "", pool).await?);
    match (pool.lost, pool.node.as_str()) {
        (true, _) => Err(Failure::failed(format!(
            "pool {} is marked as lost, so nothing can be run on its disk",
            pool.title()
        ))),
        (false, "") => Err(Failure::failed(format!("pool {} is on no node", pool.id))),
        (false, node) => Ok(node.to_string()),
    }
}
