//! What all changes have in common: permissions are asked for before the first one, the plan is
//! printed, and nothing happens without `--yes`.

use std::io::Write;
use std::time::{Duration, Instant};

use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams, Preconditions};
use serde_json::Value;

use crate::cli::{Change, Wait};
use crate::cluster::{Cluster, Scope};
use crate::failure::{Failure, Result, TIMED_OUT};
use crate::object::Kind;
use crate::text::{escaped, escaped_lines};

/// How often the progress of an operation is read.
const INTERVAL: Duration = Duration::from_secs(1);
/// A wait ends if this many polls one after another fail, after 45 seconds or more: an API server is
/// restarted within this time.
const MAX_FAILED: u32 = 10;

/// A permission that a command needs.
pub struct Need<'a> {
    /// The verb.
    pub verb: &'a str,
    /// The kind of objects.
    pub kind: &'a Kind,
    /// The namespace, for kinds that are in one.
    pub namespace: &'a str,
    /// The object; empty for all.
    pub name: &'a str,
}

/// Asks the API server for each permission, and names those that are missing.
pub async fn require(cluster: &Cluster, needs: &[Need<'_>]) -> Result<()> {
    let missing = missing(cluster, needs).await?;
    match missing.is_empty() {
        true => Ok(()),
        false => Err(Failure::denied(format!(
            "nothing was changed, because these permissions are missing:{missing}"
        ))),
    }
}

/// The permissions that the user does not have, each in a line of its own; empty if there are none.
pub async fn missing(cluster: &Cluster, needs: &[Need<'_>]) -> Result<String> {
    let api = Api::<SelfSubjectAccessReview>::all(cluster.client.clone());
    let some = |text: &str| Some(text.to_string()).filter(|text| !text.is_empty());
    let mut missing = String::new();
    for need in needs {
        let (resource, subresource) = need
            .kind
            .plural
            .split_once('/')
            .unwrap_or((need.kind.plural, ""));
        let attributes = ResourceAttributes {
            verb: some(need.verb),
            group: some(need.kind.group),
            resource: some(resource),
            subresource: some(subresource),
            namespace: some(need.namespace).filter(|_| need.kind.is_namespaced),
            name: some(need.name),
            ..ResourceAttributes::default()
        };
        let review = SelfSubjectAccessReview {
            spec: SelfSubjectAccessReviewSpec {
                resource_attributes: Some(attributes),
                ..SelfSubjectAccessReviewSpec::default()
            },
            ..SelfSubjectAccessReview::default()
        };
        let answer = api.create(&PostParams::default(), &review).await;
        let answer = answer.map_err(|error| Failure::of("asking for permissions", &error))?;
        if !answer.status.is_some_and(|status| status.allowed) {
            missing.push_str(&format!("\n  {}", shown(need)));
        }
    }
    Ok(missing)
}

fn shown(need: &Need<'_>) -> String {
    let group = match need.kind.group {
        "" => String::new(),
        group => format!(".{group}"),
    };
    let name = match need.name {
        "" => String::new(),
        name => format!("/{name}"),
    };
    let place = match (need.kind.is_namespaced, need.namespace) {
        (true, "") => " in all namespaces".to_string(),
        (true, namespace) => format!(" in namespace {namespace}"),
        (false, _) => String::new(),
    };
    format!("{} {}{group}{name}{place}", need.verb, need.kind.plural)
}

/// Prints what will be done. Fails if the user has not confirmed it; a dry run needs no `--yes`.
pub fn confirm(change: &Change, plan: &str) -> Result<()> {
    say(plan);
    match change.yes || change.dry_run {
        true => Ok(()),
        false => Err(Failure::unconfirmed()),
    }
}

/// Prints lines on stdout. A reader that is gone does not end a change in the middle.
pub fn say(lines: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{}", escaped_lines(lines));
}

/// The end of the line that reports a change.
pub fn mark(change: &Change) -> &'static str {
    match change.dry_run {
        true => " (server dry run)",
        false => "",
    }
}

/// Merges fields into an object, unless it has changed since it was read.
pub async fn patch(
    cluster: &Cluster,
    change: &Change,
    kind: &Kind,
    object: &DynamicObject,
    mut fields: Value,
) -> Result<DynamicObject> {
    let name = object.metadata.name.clone().unwrap_or_default();
    fields["metadata"]["resourceVersion"] = object.metadata.resource_version.clone().into();
    let params = PatchParams {
        dry_run: change.dry_run,
        ..PatchParams::default()
    };
    let scope = match &object.metadata.namespace {
        Some(namespace) => Scope::Namespace(namespace.clone()),
        None => Scope::All,
    };
    let api = cluster.api(kind, kind.versions[0], &scope);
    let done = api.patch(&name, &params, &Patch::Merge(fields)).await;
    done.map_err(|error| match error {
        kube::Error::Api(status) if status.code == 409 => Failure {
            is_conflict: true,
            ..Failure::failed(format!(
                "{} {name} has changed since it was read; nothing was changed, run the command again",
                kind.kind
            ))
        },
        error => Failure::of(&format!("changing {} {name}", kind.kind), &error),
    })
}

/// A field that the CustomResourceDefinition of an older release does not have is not stored.
pub fn is_stored(stored: bool, field: &str, file: &str) -> Result<()> {
    match stored {
        true => Ok(()),
        false => Err(Failure::failed(format!(
            "the API server did not store {field}: the CustomResourceDefinition is of an older release; apply deploy/chart/crds/{file}, and try again"
        ))),
    }
}

/// How far an operation is.
pub enum Progress {
    /// It goes on; what it does now.
    Running(String),
    /// It has ended, with this line or this failure.
    Ended(Result<String>),
}

/// As a message names an object.
fn titled(kind: &Kind, namespace: &str, name: &str) -> String {
    match kind.is_namespaced {
        true => format!("{} {namespace}/{name}", kind.kind),
        false => format!("{} {name}", kind.kind),
    }
}

/// Creates an object. One of a kind without namespaces ignores the namespace.
pub async fn create(
    cluster: &Cluster,
    change: &Change,
    kind: &Kind,
    namespace: &str,
    object: Value,
) -> Result<DynamicObject> {
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let action = match name {
        "" => format!("creating a {}", kind.kind),
        name => format!("creating {}", titled(kind, namespace, name)),
    };
    let object: DynamicObject = serde_json::from_value(object)
        .map_err(|error| Failure::failed(format!("{action}: {error}")))?;
    let scope = Scope::Namespace(namespace.to_string());
    let api = cluster.api(kind, kind.versions[0], &scope);
    let params = PostParams {
        dry_run: change.dry_run,
        ..PostParams::default()
    };
    let made = api.create(&params, &object).await;
    made.map_err(|error| Failure::of(&action, &error))
}

/// Deletes an object, if it is still that of this UID and, if one is given, of this
/// version. One that is gone is no failure.
pub async fn delete(
    cluster: &Cluster,
    change: &Change,
    kind: &Kind,
    namespace: &str,
    name: &str,
    (uid, version): (&str, Option<&str>),
) -> Result<()> {
    let scope = Scope::Namespace(namespace.to_string());
    let mut params = DeleteParams::default().preconditions(Preconditions {
        uid: Some(uid.into()),
        resource_version: version.map(str::to_string),
    });
    params.dry_run = change.dry_run;
    let api = cluster.api(kind, kind.versions[0], &scope);
    match api.delete(name, &params).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        Err(error) => {
            let action = format!("deleting {}", titled(kind, namespace, name));
            Err(Failure::of(&action, &error))
        }
    }
}

/// Reads the progress until the operation has ended or the time is over, and prints its last line.
pub async fn follow<A>(wait: &Wait, what: &str, read: impl FnMut() -> A) -> Result<()>
where
    A: Future<Output = Result<Progress>>,
{
    say(&until_end(wait, what, read).await?);
    Ok(())
}

/// The same, without printing the last line on stdout. Each line that differs from the one before it
/// is printed on stderr.
pub async fn until_end<A>(wait: &Wait, what: &str, mut read: impl FnMut() -> A) -> Result<String>
where
    A: Future<Output = Result<Progress>>,
{
    let begun = Instant::now();
    let mut polls = Polls::default();
    let mut last = String::new();
    loop {
        let line = match polls.next(what, read().await)? {
            Progress::Ended(result) => return result,
            Progress::Running(line) => line,
        };
        if line != last {
            eprintln!("{}", escaped(&line));
            last = line;
        }
        if wait.timeout.is_some_and(|limit| begun.elapsed() >= limit) {
            return Err(Failure {
                code: TIMED_OUT,
                ..Failure::failed(format!(
                    "{what} has not ended within --timeout; it goes on in the cluster"
                ))
            });
        }
        tokio::time::sleep(polls.pause()).await;
    }
}

/// The polls of an operation. The operation goes on while the API server is away, so a poll that fails
/// does not end it.
#[derive(Debug, Default)]
struct Polls {
    /// How many have failed since the last one that did not.
    failed: u32,
}

impl Polls {
    /// What a poll has found. Fails if the answer is final, or if too many polls have failed.
    fn next(&mut self, what: &str, found: Result<Progress>) -> Result<Progress> {
        match found {
            Err(failure) if failure.is_transient && self.failed + 1 < MAX_FAILED => {
                self.failed += 1;
                Ok(Progress::Running(format!(
                    "{}; it is read again",
                    failure.message
                )))
            }
            Err(failure) if failure.is_transient => Err(Failure {
                message: format!(
                    "the progress of {what} could not be read {MAX_FAILED} times one after another: {}",
                    failure.message
                ),
                ..failure
            }),
            found => {
                self.failed = 0;
                found
            }
        }
    }

    /// The time before the next poll, which is longer after each that has failed.
    fn pause(&self) -> Duration {
        INTERVAL * (self.failed + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn away() -> Result<Progress> {
        Err(Failure {
            is_transient: true,
            ..Failure::failed("reading x: connection refused".into())
        })
    }

    #[test]
    fn polls_that_fail_do_not_end_a_wait_until_too_many_have_failed_in_a_row() {
        let mut polls = Polls::default();
        for _ in 0..3 {
            for n in 1..MAX_FAILED {
                let Ok(Progress::Running(line)) = polls.next("x", away()) else {
                    panic!("it has ended after {n} polls")
                };
                assert!(line.contains("connection refused"), "{line}");
            }
            let running = Ok(Progress::Running(String::new()));
            assert!(polls.next("x", running).is_ok());
            assert_eq!(polls.pause(), INTERVAL);
        }
        for _ in 1..MAX_FAILED {
            assert!(polls.next("x", away()).is_ok());
        }
        assert!(polls.pause() > INTERVAL);
        let Err(failure) = polls.next("the move", away()) else {
            panic!("it never ends")
        };
        assert_eq!(failure.code, crate::failure::FAILED);
        for part in ["the move", "connection refused", "10 times"] {
            assert!(failure.message.contains(part), "{}", failure.message);
        }
    }

    #[test]
    fn a_refusal_ends_a_wait_at_once() {
        let denied = Err(Failure::denied("reading x: forbidden".into()));
        let Err(failure) = Polls::default().next("x", denied) else {
            panic!("it goes on")
        };
        assert_eq!(failure.message, "reading x: forbidden");
    }
}
