//! Reads everything that the decision about a claim needs. Claim, prime claim, pod and PersistentVolume
//! are read from the API server each time, because a decision from an outdated pod would repeat an
//! attempt.

use std::fmt;

use ::kube::Error as KubeError;
use ::kube::api::{Api, LogParams};
use k8s_openapi::api::core::v1::{PersistentVolume, PersistentVolumeClaim, Pod, Secret};
use k8s_openapi::jiff::Timestamp;

use super::decide::{Class, NOT_GRANTED, PodSeen, Reason, Seen};
use super::grant::is_granted;
use super::metrics::Numbers;
use super::snapshots;
use super::source::{Kind, Source, SourceName, source_of};
use super::state::{POD, annotation, pod_phase, prime_name, uid, volume_name};
use super::turns;
use super::{KnownClass, Populators};
use crate::error::Result;
use crate::router::kube::{API_TIMEOUT, ask};

/// The annotation of a Secret with the origins (scheme, host and port) to which it may be sent.
const ORIGINS: &str = "slackwater.dev/origins";
/// Of the log of a pod.
const MAX_LOG_BYTES: i64 = 4096;

/// A claim, and what is known of it.
pub(super) struct Target {
    pub(super) claim: PersistentVolumeClaim,
    /// `None` before it is observed, and if it is gone.
    pub(super) seen: Option<Box<Seen>>,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "claim {}", path(&self.claim))
    }
}

/// "namespace/name".
pub(super) fn path(claim: &PersistentVolumeClaim) -> String {
    let meta = &claim.metadata;
    let namespace = meta.namespace.as_deref().unwrap_or_default();
    format!("{namespace}/{}", meta.name.as_deref().unwrap_or_default())
}

/// The class of a claim, from memory.
pub(super) fn class_of(populators: &Populators, claim: &PersistentVolumeClaim) -> Class {
    let name = claim
        .spec
        .as_ref()
        .and_then(|spec| spec.storage_class_name.as_deref());
    match name.and_then(|name| populators.class(name)) {
        Some(KnownClass { driver, waits, .. }) if driver == populators.options.settings.driver => {
            Class::Own { waits }
        }
        Some(_) | None => Class::Foreign,
    }
}

/// A source, from memory.
pub(super) fn known_source(
    populators: &Populators,
    name: &SourceName,
) -> Result<(Kind, Source), Reason> {
    let source = populators.source(name.kind, &name.path());
    let source = source.filter(|source| source.metadata.deletion_timestamp.is_none());
    source.map(|source| (name.kind, source)).ok_or_else(|| {
        let message = format!("{} {} does not exist", name.kind.as_str(), name.path());
        ("SourceMissing", message)
    })
}

/// Reads a claim and everything that it depends on.
pub(super) async fn observe(populators: &Populators, target: Target) -> Result<Target> {
    let namespace = target.claim.metadata.namespace.clone().unwrap_or_default();
    let reader = Reader {
        populators,
        namespace: &namespace,
    };
    let name = target.claim.metadata.name.clone().unwrap_or_default();
    let claim = reader.claim(&name).await?;
    let claim = claim.filter(|claim| uid(claim) == uid(&target.claim));
    let Some((claim, source)) = claim
        .and_then(|claim| Some((source_of(&claim)?, claim)))
        .map(|(source, claim)| (claim, source))
    else {
        return Ok(Target {
            seen: None,
            ..target
        });
    };
    let prime = reader.claim(&prime_name(&claim)).await?;
    let pod = reader.pod(&prime_name(&claim)).await?;
    let volume = match prime.as_ref().and_then(volume_name) {
        Some(name) => reader.volume(name).await?,
        None => None,
    };
    let numbers = match (&pod, &prime) {
        (PodSeen::Here(pod), Some(prime)) if annotation(prime, POD) == Some(uid(&**pod)) => {
            reader.numbers(pod).await
        }
        _ => None,
    };
    let source = reader.source(&source).await?;
    let origins = match &source {
        Ok((_, source)) if pod == PodSeen::Absent => reader.origins(source).await?,
        _ => Ok(Vec::new()),
    };
    let cache = match snapshots::known(populators, &claim, prime.as_ref(), &source) {
        Some(known) => Some(snapshots::read(populators, known, prime.as_ref(), &pod, &claim).await),
        None => None,
    };
    let waits_for_turn = match pod {
        PodSeen::Absent => turns::read(populators).refusal(&claim),
        PodSeen::Here(_) | PodSeen::Forbidden(_) => None,
    };
    let seen = Seen {
        now: Timestamp::now(),
        driver: populators.options.settings.driver.clone(),
        class: class_of(populators, &claim),
        claim: claim.clone(),
        source,
        origins,
        prime,
        volume,
        pod,
        numbers,
        cache,
        waits_for_turn,
    };
    Ok(Target {
        claim,
        seen: Some(Box::new(seen)),
    })
}

struct Reader<'a> {
    populators: &'a Populators,
    namespace: &'a str,
}

impl Reader<'_> {
    async fn claim(&self, name: &str) -> Result<Option<PersistentVolumeClaim>> {
        let api = Api::namespaced(self.populators.client.clone(), self.namespace);
        ask(
            &format!("claim {}/{name}", self.namespace),
            api.get_opt(name),
        )
        .await
    }

    async fn volume(&self, name: &str) -> Result<Option<PersistentVolume>> {
        let api = Api::all(self.populators.client.clone());
        ask(&format!("PersistentVolume {name}"), api.get_opt(name)).await
    }

    /// The rights to pods are those that the owner of the namespace has given.
    async fn pod(&self, name: &str) -> Result<PodSeen> {
        let api = Api::<Pod>::namespaced(self.populators.client.clone(), self.namespace);
        let pod = async {
            match api.get_opt(name).await {
                Ok(Some(pod)) => Ok(PodSeen::Here(Box::new(pod))),
                Ok(None) => Ok(PodSeen::Absent),
                Err(KubeError::Api(status)) if status.code == 403 => {
                    Ok(PodSeen::Forbidden(self.advice()))
                }
                Err(error) => Err(error),
            }
        };
        ask(&format!("pod {}/{name}", self.namespace), pod).await
    }

    fn advice(&self) -> String {
        let settings = &self.populators.options.settings;
        let (role, account, namespace) = (&settings.role, &settings.account, self.namespace);
        format!(
            "namespace {namespace} does not allow pods that fill volumes; its owner allows them with: kubectl create rolebinding {role} --namespace {namespace} --clusterrole {role} --serviceaccount {account}"
        )
    }

    /// The last line of the log. A log that cannot be read says nothing.
    async fn numbers(&self, pod: &Pod) -> Option<Numbers> {
        if pod_phase(pod) == "Pending" {
            return None;
        }
        let api = Api::<Pod>::namespaced(self.populators.client.clone(), self.namespace);
        let params = LogParams {
            tail_lines: Some(1),
            limit_bytes: Some(MAX_LOG_BYTES),
            ..LogParams::default()
        };
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        let log = tokio::time::timeout(API_TIMEOUT, api.logs(name, &params)).await;
        Numbers::parse(&log.ok()?.ok()?)
    }

    async fn source(&self, name: &SourceName) -> Result<Result<(Kind, Source), Reason>> {
        if name.namespace != self.namespace
            && !is_granted(&self.populators.client, name, self.namespace).await?
        {
            let message = format!(
                "namespace {} has no ReferenceGrant that allows claims of namespace {} to use {} {}",
                name.namespace,
                self.namespace,
                name.kind.as_str(),
                name.name
            );
            return Ok(Err((NOT_GRANTED, message)));
        }
        Ok(known_source(self.populators, name))
    }

    /// The origins to which the Secret of a source may be sent. Only its metadata is read.
    async fn origins(&self, source: &Source) -> Result<Result<Vec<String>, Reason>> {
        let Some(secret) = &source.spec.secret_ref else {
            return Ok(Ok(Vec::new()));
        };
        let (name, namespace) = (&secret.name, self.namespace);
        let account = &self.populators.options.settings.account;
        let api = Api::<Secret>::namespaced(self.populators.client.clone(), namespace);
        let origins = async {
            let found = match api.get_metadata_opt(name).await {
                Ok(found) => found,
                Err(KubeError::Api(status)) if status.code == 403 => {
                    let message = format!(
                        "the annotation {ORIGINS} of Secret {name} cannot be read: allow {account} the verb get for this Secret, with a Role and a RoleBinding in namespace {namespace}"
                    );
                    return Ok(Err(("SecretNotReadable", message)));
                }
                Err(error) => return Err(error),
            };
            let Some(found) = found else {
                let message = format!("Secret {namespace}/{name} does not exist");
                return Ok(Err(("SecretMissing", message)));
            };
            let listed = annotation(&found, ORIGINS).unwrap_or_default();
            let origins = parse_origins(listed);
            match origins.is_empty() {
                false => Ok(Ok(origins)),
                true => Ok(Err((
                    "SecretRefused",
                    format!(
                        "Secret {namespace}/{name} has no annotation {ORIGINS} with the origins to which it may be sent, such as https://images.example"
                    ),
                ))),
            }
        };
        ask(&format!("Secret {namespace}/{name}"), origins).await
    }
}

/// Origins are separated by commas or spaces.
fn parse_origins(text: &str) -> Vec<String> {
    let each = text.split(|c: char| c == ',' || c.is_whitespace());
    let each = each.filter(|one| !one.is_empty());
    each.map(str::to_string).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_separated_by_commas_or_spaces() {
        let origins =
            parse_origins(" https://a.example,https://b.example:8443\nhttps://c.example ");
        let expected = [
            "https://a.example",
            "https://b.example:8443",
            "https://c.example",
        ];
        assert_eq!(origins, expected);
        assert!(parse_origins(" , ").is_empty());
    }
}
