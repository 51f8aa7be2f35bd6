//! Completion: kubectl starts `kubectl_complete-slackwater` with the words of the command line, and
//! reads one candidate from each line, and then `:` and what the shell may do besides.
//!
//! It is this program under another name.

use std::path::Path;
use std::time::Duration;

use clap::{ArgAction, CommandFactory, FromArgMatches};
use kube::api::ListParams;
use kube::config::Kubeconfig;

use crate::cli::{Cli, Connection};
use crate::cluster::object::{self, Fields, Kind};
use crate::cluster::{Cluster, Scope};
use crate::text::is_hidden;

/// The name under which kubectl starts the program for candidates.
const NAME: &str = "kubectl_complete-slackwater";
/// The time after which a candidate is of no use.
const TIMEOUT: Duration = Duration::from_secs(3);
/// The shell adds no names of files: `ShellCompDirectiveNoFileComp` of cobra.
const NO_FILES: u8 = 4;
/// The shell completes names of files: `ShellCompDirectiveDefault`.
const FILES: u8 = 0;

/// What the last word can be.
#[derive(Debug, PartialEq, Eq)]
enum Candidates {
    /// One of these.
    Words(Vec<String>),
    /// The name of an object of one of these kinds.
    Objects(&'static [&'static Kind]),
    /// The ID of an orphan.
    Orphans,
    /// A context of the kubeconfig.
    Contexts,
    /// A file.
    Files,
}

/// Whether the program was started under the name for completion.
pub fn is_requested(program: &Path) -> bool {
    program.file_stem().is_some_and(|name| name == NAME)
}

/// Prints candidates for the last word.
pub async fn run(words: &[String]) {
    let (last, before) = match words.split_last() {
        Some((last, before)) => (last.as_str(), before),
        None => ("", words),
    };
    let wanted = candidates_after(before, last);
    let directive = match wanted {
        Candidates::Files => FILES,
        _ => NO_FILES,
    };
    let mut candidates = match wanted {
        Candidates::Words(words) => words,
        Candidates::Files => Vec::new(),
        Candidates::Contexts => {
            let file = Kubeconfig::read().unwrap_or_default();
            file.contexts
                .into_iter()
                .map(|context| context.name)
                .collect()
        }
        Candidates::Objects(kinds) => {
            let found = tokio::time::timeout(TIMEOUT, objects(before, kinds)).await;
            found.ok().flatten().unwrap_or_default()
        }
        Candidates::Orphans => {
            let found = tokio::time::timeout(TIMEOUT, orphans(before)).await;
            found.ok().flatten().unwrap_or_default()
        }
    };
    candidates.retain(|word| word.starts_with(last) && !word.chars().any(is_hidden));
    candidates.sort();
    let lines: String = candidates.iter().map(|word| format!("{word}\n")).collect();
    crate::listing::print(&format!("{lines}:{directive}\n"), &[]);
}

/// What the last word can be, after these.
fn candidates_after(before: &[String], last: &str) -> Candidates {
    let mut whole = Cli::command();
    whole.build();
    let mut command = &whole;
    let mut option = None;
    for word in before {
        if option.take().is_some() {
            continue;
        }
        if let Some(name) = word.strip_prefix('-') {
            let is_it = |argument: &&clap::Arg| match name.strip_prefix('-') {
                Some(long) => argument.get_long() == Some(long),
                None => name.len() == 1 && argument.get_short() == name.chars().next(),
            };
            let takes_value = |argument: &&clap::Arg| {
                matches!(argument.get_action(), ArgAction::Set | ArgAction::Append)
            };
            option = command.get_arguments().find(is_it).filter(takes_value);
        } else if let Some(below) = command.find_subcommand(word) {
            command = below;
        }
    }
    if let Some(option) = option {
        return value_of(option);
    }
    if last.starts_with('-') {
        let options = command
            .get_arguments()
            .filter_map(|argument| argument.get_long());
        return Candidates::Words(options.map(|name| format!("--{name}")).collect());
    }
    if command.has_subcommands() {
        let names = command
            .get_subcommands()
            .map(|below| below.get_name().to_string());
        return Candidates::Words(names.collect());
    }
    let positional = command.get_positionals().next();
    positional.map_or(Candidates::Words(Vec::new()), value_of)
}

fn value_of(argument: &clap::Arg) -> Candidates {
    match argument.get_id().as_str() {
        "claim" => Candidates::Objects(&[&object::CLAIM]),
        "pool" | "to_pool" => Candidates::Objects(&[&object::POOL]),
        "node" | "to_node" | "on_node" => Candidates::Objects(&[&object::NODE]),
        "source" => Candidates::Objects(&[&object::GROUP, &object::SNAPSHOT]),
        "schedule" => Candidates::Objects(&[&object::SCHEDULE]),
        "to" | "snapshot" | "base" => Candidates::Objects(&[&object::SNAPSHOT]),
        "group" => Candidates::Objects(&[&object::GROUP]),
        "statefulset" => Candidates::Objects(&[&object::STATEFUL_SET]),
        "storage_class" => Candidates::Objects(&[&object::STORAGE_CLASS]),
        "namespace" | "to_namespace" | "driver_namespace" => {
            Candidates::Objects(&[&object::NAMESPACE])
        }
        "adopt" | "delete" | "keep" => Candidates::Orphans,
        "context" => Candidates::Contexts,
        "kubeconfig" | "file" => Candidates::Files,
        _ => {
            let values = argument.get_possible_values().into_iter();
            Candidates::Words(values.map(|value| value.get_name().to_string()).collect())
        }
    }
}

/// The cluster that the words before name.
async fn cluster(before: &[String]) -> Option<Cluster> {
    let words = std::iter::once("x").chain(before.iter().map(String::as_str));
    let matches = Cli::command()
        .ignore_errors(true)
        .try_get_matches_from(words)
        .ok()?;
    let connection = Connection::from_arg_matches(&matches).ok()?;
    Cluster::connect(&connection).await.ok()
}

/// The IDs of orphans that Pools list.
async fn orphans(before: &[String]) -> Option<Vec<String>> {
    let cluster = cluster(before).await?;
    let params = crate::model::pools_of(&cluster.driver, None);
    let pools = cluster.find(&object::POOL, &Scope::All, &params).await;
    let pools = pools.ok()??;
    let listed = pools
        .iter()
        .flat_map(|pool| pool.list("/status/orphans/listed"));
    let ids = listed.filter_map(|one| one["id"].as_str());
    Some(ids.map(str::to_string).collect())
}

/// Names of objects. Pools are NODE/NAME.
async fn objects(before: &[String], kinds: &[&Kind]) -> Option<Vec<String>> {
    let cluster = cluster(before).await?;
    let mut names = Vec::new();
    for kind in kinds {
        names.extend(names_of(&cluster, kind).await.unwrap_or_default());
    }
    Some(names)
}

async fn names_of(cluster: &Cluster, kind: &Kind) -> Option<Vec<String>> {
    if *kind == object::POOL {
        let pools = crate::model::pools(cluster).await.ok()??;
        return Some(pools.values().map(crate::model::Pool::title).collect());
    }
    let scope = Scope::Namespace(cluster.namespace.clone());
    let found = cluster
        .find(kind, &scope, &ListParams::default())
        .await
        .ok()??;
    let is_own = |object: &&kube::api::DynamicObject| {
        (*kind != object::CLAIM || crate::model::driver_of(object) == cluster.driver)
            && (*kind != object::STORAGE_CLASS || object.text("/provisioner") == cluster.driver)
    };
    let names = found
        .iter()
        .filter(is_own)
        .map(|object| object.name().to_string());
    Some(names.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(words: &[&str], last: &str) -> Candidates {
        let words: Vec<_> = words.iter().map(ToString::to_string).collect();
        candidates_after(&words, last)
    }

    #[track_caller]
    fn has(wanted: Candidates, word: &str) {
        let Candidates::Words(words) = wanted else {
            panic!("{wanted:?}")
        };
        assert!(words.contains(&word.to_string()), "{words:?}");
    }

    #[test]
    fn each_place_of_the_command_line_has_its_candidates() {
        has(after(&[], ""), "status");
        has(after(&["volumes"], "--"), "--selector");
        has(after(&["volumes"], "--"), "--context");
        has(after(&["pools", "-o"], ""), "wide");
        has(after(&["pool"], ""), "evacuate");
        assert_eq!(
            after(&["pool", "lose"], ""),
            Candidates::Objects(&[&object::POOL])
        );
        assert_eq!(
            after(&["move", "x", "--to-node"], ""),
            Candidates::Objects(&[&object::NODE])
        );
        let sources = Candidates::Objects(&[&object::GROUP, &object::SNAPSHOT]);
        assert_eq!(after(&["restore", "--suffix", "x"], ""), sources);
        assert_eq!(
            after(&["restore", "x", "--statefulset"], ""),
            Candidates::Objects(&[&object::STATEFUL_SET])
        );
        has(after(&["schedule"], ""), "run");
        let schedules = Candidates::Objects(&[&object::SCHEDULE]);
        assert_eq!(after(&["schedule", "retention"], ""), schedules);
        assert_eq!(after(&["schedule", "run"], ""), schedules);
        let snapshots = Candidates::Objects(&[&object::SNAPSHOT]);
        assert_eq!(after(&["export"], ""), snapshots);
        assert_eq!(after(&["export", "x", "--base"], ""), snapshots);
        assert_eq!(after(&["export", "x", "-o"], ""), Candidates::Files);
        assert_eq!(after(&["import", "x", "--file"], ""), Candidates::Files);
        has(after(&["doctor", "--output"], ""), "json");
        let claims = Candidates::Objects(&[&object::CLAIM]);
        assert_eq!(after(&["revert"], ""), claims);
        assert_eq!(
            after(&["revert", "x", "--to"], ""),
            Candidates::Objects(&[&object::SNAPSHOT])
        );
        assert_eq!(
            after(&["revert", "--group"], ""),
            Candidates::Objects(&[&object::GROUP])
        );
        has(after(&["-n", "status", "volumes", "--output"], ""), "json");
        assert_eq!(after(&["who"], ""), claims);
        // The value of an option is no command.
        assert_eq!(after(&["-n", "volumes", "who"], ""), claims);
        assert_eq!(
            after(&["who", "-n"], ""),
            Candidates::Objects(&[&object::NAMESPACE])
        );
        for option in ["--adopt", "--delete", "--keep"] {
            assert_eq!(after(&["orphans", option], ""), Candidates::Orphans);
        }
        let classes = Candidates::Objects(&[&object::STORAGE_CLASS]);
        assert_eq!(after(&["orphans", "--class"], ""), classes);
        assert_eq!(after(&["--context"], ""), Candidates::Contexts);
        assert_eq!(after(&["--kubeconfig"], ""), Candidates::Files);
        assert_eq!(after(&["pools"], ""), Candidates::Words(Vec::new()));
        assert!(is_requested(Path::new(
            "/usr/bin/kubectl_complete-slackwater"
        )));
        assert!(!is_requested(Path::new("/usr/bin/kubectl-slackwater")));
    }

    #[test]
    fn nodes_are_candidates_where_a_node_is_named() {
        let nodes = Candidates::Objects(&[&object::NODE]);
        for command in [
            &["doctor"][..],
            &["import"],
            &["pool", "forget", "--on-node"],
        ] {
            assert_eq!(after(command, ""), nodes, "{command:?}");
        }
    }
}
