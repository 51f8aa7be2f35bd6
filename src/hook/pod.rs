//! Hooks of pods: an exec in a container of the pod that uses the volume, as configured in the
//! pod's annotations. A user who can write them can run programs in that pod anyway. For that
//! reason a hook is never read from a class or a PVC, which can only set `skip`.
//!
//! Hooks are permitted per namespace: its owner binds a ClusterRole in it ([`HookRights`]).

mod annotation;
mod exec;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use ::kube::api::{Api, ListParams};
use ::kube::{Client, Error as KubeError, ResourceExt};
use futures_util::future::join_all;
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use tokio::runtime::Handle;

use super::session::{Running, Sessions, shared_by};
use super::{HookTarget, Hooks, Quiesced};
use crate::error::{Error, Result, chain};
use crate::model::SharedVolume;
use annotation::PodHook;

/// Time between the end of a session's stdin and giving it up. It is longer than on the same
/// machine because API server, kubelet and container runtime are involved.
const RELEASE_GRACE: Duration = Duration::from_secs(20);
/// Time limit for listing pods.
const LIST_PODS_TIMEOUT: Duration = Duration::from_secs(20);

/// The ClusterRole that a namespace's owner binds, and the service account to which it is bound, so
/// that hooks may run there; used in the message if this is missing. The default names are those of
/// the chart in a release called `slackwater`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HookRights {
    /// The ClusterRole that permits exec.
    pub role: String,
    /// The router's service account, as NAMESPACE:NAME.
    pub account: String,
}

impl Default for HookRights {
    fn default() -> HookRights {
        HookRights {
            role: "slackwater-hooks".into(),
            account: "slackwater:slackwater-controller".into(),
        }
    }
}

impl HookRights {
    /// What the user can do about a refusal.
    fn advice(&self, what: &str, namespace: &str) -> String {
        let HookRights { role, account } = self;
        format!(
            "{what} is forbidden for the driver's controller; an administrator of namespace {namespace} can allow it with a RoleBinding of ClusterRole {role} to ServiceAccount {account}, or the chart can with hooks.namespaces"
        )
    }
}

/// Hooks that run by exec.
pub struct PodHooks {
    client: Client,
    rights: HookRights,
    /// The runtime that executes requests; callers are blocking threads.
    runtime: Handle,
    grace: Duration,
}

/// A hook that was found, and its pod.
struct Found {
    namespace: String,
    pod: String,
    hook: PodHook,
}

impl Found {
    fn name(&self) -> String {
        format!("{}/{}/{}", self.namespace, self.pod, self.hook.container)
    }
}

impl PodHooks {
    /// Must be called within a runtime.
    pub fn new(client: Client) -> PodHooks {
        PodHooks {
            client,
            rights: HookRights::default(),
            runtime: Handle::current(),
            grace: RELEASE_GRACE,
        }
    }

    /// Sets the names of the objects that permit exec.
    #[must_use]
    pub fn with_rights(mut self, rights: HookRights) -> PodHooks {
        self.rights = rights;
        self
    }

    /// Sets the time between the end of a session's stdin and giving it up; the default is 20 s.
    #[must_use]
    pub fn with_grace(mut self, grace: Duration) -> PodHooks {
        self.grace = grace;
        self
    }

    /// Waits for an answer, on a thread that may block.
    fn ask<T>(
        &self,
        namespace: &str,
        what: &str,
        answer: impl Future<Output = Result<T, KubeError>>,
    ) -> Result<T> {
        let answer = self
            .runtime
            .block_on(async { tokio::time::timeout(LIST_PODS_TIMEOUT, answer).await });
        let reason = match answer {
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) if is_forbidden(&error) => self.rights.advice(what, namespace),
            Ok(Err(error)) => format!("{what} failed: {}", chain(&error)),
            Err(_) => format!("{what} took longer than {} s", LIST_PODS_TIMEOUT.as_secs()),
        };
        Err(Error::quiesce_failed(
            format!("of namespace {namespace}"),
            reason,
        ))
    }

    /// The running pods of a namespace, only those on the given node if it is known: a namespace
    /// may have thousands on others.
    fn pods(&self, namespace: &str, node: Option<&str>) -> Result<Vec<Pod>> {
        let api = Api::<Pod>::namespaced(self.client.clone(), namespace);
        let running = ListParams::default().fields(&selector(node));
        let what = "listing its pods";
        let pods = self.ask(namespace, what, async { api.list(&running).await })?;
        Ok(pods.items)
    }

    /// Whether the annotations of a PVC disable the hooks of its pods.
    fn is_skipped(&self, namespace: &str, claim: &str) -> Result<bool> {
        let api = Api::<PersistentVolumeClaim>::namespaced(self.client.clone(), namespace);
        let what = format!("reading claim {claim}");
        let found = self.ask(namespace, &what, async { api.get_opt(claim).await })?;
        let Some(found) = found else {
            return Ok(false);
        };
        annotation::has_skip(found.annotations()).map_err(|problem| {
            Error::quiesce_failed(format!("of claim {namespace}/{claim}"), problem)
        })
    }

    /// The hook with a name, as its pod's annotations configure it now.
    fn get_hook(&self, name: &str) -> Result<Found> {
        let mut parts = name.splitn(3, '/');
        let (Some(namespace), Some(pod), Some(container)) =
            (parts.next(), parts.next(), parts.next())
        else {
            return Err(Error::bug(format!(
                "hook {name} is one of the selected hooks"
            )));
        };
        let failed = |reason: String| Error::quiesce_failed(name, reason);
        let api = Api::<Pod>::namespaced(self.client.clone(), namespace);
        let what = format!("reading pod {pod}");
        let now = self.ask(namespace, &what, async { api.get_opt(pod).await })?;
        let now = now.ok_or_else(|| failed("its pod was deleted".into()))?;
        match PodHook::of(&now).map_err(failed)? {
            Some(hook) if hook.container == container => Ok(Found {
                namespace: namespace.into(),
                pod: pod.into(),
                hook,
            }),
            Some(_) | None => Err(failed(
                "its pod's annotations have changed; try again".into(),
            )),
        }
    }
}

impl Hooks for PodHooks {
    fn how(&self) -> &'static str {
        "annotate the pod that uses it with hooks.slackwater.dev/session"
    }

    fn wanted(&self, targets: &[HookTarget], shared: SharedVolume) -> Result<Vec<String>> {
        let mut pods: BTreeMap<(&str, Option<&str>), Vec<Pod>> = BTreeMap::new();
        let mut wanted = BTreeSet::new();
        for target in targets {
            let claim = target
                .claim
                .as_deref()
                .and_then(|claim| claim.split_once('/'));
            let Some((namespace, claim)) = claim else {
                continue;
            };
            let place = (namespace, target.node.as_deref());
            let here = match pods.entry(place) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(place_of) => place_of.insert(self.pods(namespace, place.1)?),
            };
            let its = hooks_of(namespace, claim, here)?;
            if its.is_empty() || self.is_skipped(namespace, claim)? {
                continue;
            }
            wanted.extend(shared_by(&target.volume_id, its, shared)?);
        }
        Ok(wanted.into_iter().collect())
    }

    fn quiesce(&self, names: &[String], timeout: Duration) -> Result<Box<dyn Quiesced>> {
        let begun = Instant::now();
        let found: Vec<Found> = names
            .iter()
            .map(|name| self.get_hook(name))
            .collect::<Result<_>>()?;
        let starts = found.iter().map(|found| {
            let limit = timeout
                .min(found.hook.timeout)
                .saturating_sub(begun.elapsed());
            exec::start(&self.client, &self.rights, found, limit)
        });
        let starting = Instant::now();
        let started = self.runtime.block_on(join_all(starts));
        // If one cannot start, dropping `sessions` releases those that have started.
        let mut sessions = Sessions::new(self.grace);
        let mut refused = None;
        for (found, session) in found.iter().zip(started) {
            match session {
                Ok(session) => sessions.running.push(Running {
                    name: found.name(),
                    begun: starting,
                    timeout: found.hook.timeout,
                    is_here: false,
                    session: Box::new(session),
                }),
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        match refused {
            Some(error) => Err(error),
            None => sessions.ready(begun, timeout),
        }
    }
}

/// Names of the hooks of the pods that use a PVC, in order.
fn hooks_of(namespace: &str, claim: &str, pods: &[Pod]) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for pod in pods.iter().filter(|pod| annotation::uses(pod, claim)) {
        let name = pod.name_any();
        let hook = PodHook::of(pod).map_err(|reason| {
            Error::quiesce_failed(format!("of pod {namespace}/{name}"), reason)
        })?;
        if let Some(hook) = hook {
            names.push(format!("{namespace}/{name}/{}", hook.container));
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// The field selector for pods.
fn selector(node: Option<&str>) -> String {
    match node {
        Some(node) => format!("status.phase=Running,spec.nodeName={node}"),
        None => "status.phase=Running".into(),
    }
}

fn is_forbidden(error: &KubeError) -> bool {
    matches!(error, KubeError::Api(status) if status.is_forbidden())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pods_of_other_nodes_are_not_listed_where_the_node_is_known() {
        assert_eq!(
            selector(Some("node-7")),
            "status.phase=Running,spec.nodeName=node-7"
        );
        assert_eq!(selector(None), "status.phase=Running");
    }
}
