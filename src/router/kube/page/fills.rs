//! Claims that are being filled from data sources, as the status of each source has them.

use ::kube::Client;
use ::kube::api::{Api, ListParams};

use super::cuts::MAX_PAGES;
use crate::error::chain;
use crate::router::kube::lists::first_pages;
use crate::router::kube::populators::source::{ClaimStatus, Kind, Source};
use crate::telemetry::page::world::Work;

/// Sources of one page of a list. The status of each has up to 100 claims.
const PER_PAGE: u32 = 100;

/// What waits for a person or a pod, and not for a copy.
const NOT_BEGUN: &str = "WaitForFirstConsumer";

/// Claims that are being filled, and why some of them are missing.
#[derive(Default)]
pub(super) struct Fills {
    pub(super) work: Vec<Work>,
    pub(super) problem: Option<String>,
}

/// Reads the data sources of the cluster.
pub(super) async fn read(client: &Client) -> Fills {
    let mut fills = Fills::default();
    for kind in Kind::ALL {
        let api = Api::<Source>::all_with(client.clone(), &kind);
        let list = |params: ListParams| {
            let api = api.clone();
            async move { api.list(&params).await }
        };
        let what = format!("{}s", kind.as_str());
        let params = ListParams::default().limit(PER_PAGE);
        match first_pages(&what, params, MAX_PAGES, list).await {
            Ok(Some((sources, has_more))) => {
                if has_more {
                    let count = sources.len();
                    let why = format!("only the first {count} {what} were read");
                    fills.problem.get_or_insert(why);
                }
                let each = sources.iter().flat_map(|source| of_source(kind, source));
                fills.work.extend(each);
            }
            // The cluster does not have the kind.
            Ok(None) => {}
            Err(error) => drop(fills.problem.get_or_insert(chain(&error))),
        }
    }
    fills
}

fn of_source(kind: Kind, source: &Source) -> Vec<Work> {
    let claims = source.status.iter().flat_map(|status| &status.claims);
    let open = claims.filter(|claim| {
        let has_ended = matches!(claim.phase.as_str(), "Populated" | "Failed");
        !has_ended && claim.reason != NOT_BEGUN
    });
    open.map(|claim| fill(kind, source, claim)).collect()
}

fn fill(kind: Kind, source: &Source, claim: &ClaimStatus) -> Work {
    let since = claim.progress_since.as_ref().map(|at| at.0);
    // In another phase, its numbers are those of the phase before.
    let is_filling = claim.phase == "Populating";
    Work {
        resource: kind.plural(),
        namespace: source.metadata.namespace.clone().unwrap_or_default(),
        name: source.metadata.name.clone().unwrap_or_default(),
        what: format!(
            "claim {}/{} is filled from {}",
            claim.namespace,
            claim.name,
            kind.as_str()
        ),
        phase: claim.phase.clone(),
        message: claim.message.clone(),
        since: claim.since.as_ref().map(|at| at.0),
        done_bytes: claim.received_bytes.unwrap_or(0),
        total_bytes: claim.total_bytes.unwrap_or(0),
        copying_since: since.filter(|_| is_filling),
        done_before: claim.progress_since_bytes.unwrap_or(0),
        reported: claim
            .progress_at
            .as_ref()
            .map(|at| at.0)
            .filter(|_| is_filling),
        ..Work::default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn claims_that_are_not_filled_yet_are_running_work() {
        let claim = |name: &str, phase: &str, reason: &str| {
            json!({"namespace": "bank", "name": name, "uid": name, "phase": phase, "reason": reason,
                "message": "the pod fills the volume", "receivedBytes": 7, "totalBytes": 9,
                "since": "2026-01-02T03:00:00Z", "progressAt": "2026-01-02T03:05:00Z",
                "progressSince": "2026-01-02T03:04:00Z", "progressSinceBytes": 3})
        };
        let source = json!({"metadata": {"name": "base", "namespace": "shop"}, "spec": {},
            "status": {"claims": [claim("a", "Failed", "PopulateFailed"),
                claim("b", "Waiting", "WaitForFirstConsumer"), claim("c", "Waiting", "WaitForTurn"),
                claim("d", "Populating", "Populating"), claim("e", "Populated", "Populated")]}});
        let source: Source = serde_json::from_value(source).unwrap();
        let found = of_source(Kind::Oci, &source);
        let what: Vec<_> = found.iter().map(|work| work.what.as_str()).collect();
        let expected = ["c", "d"].map(|name| format!("claim bank/{name} is filled from OciSource"));
        assert_eq!(what, expected);
        let at = |minute: u8| Some(format!("2026-01-02T03:0{minute}:00Z").parse().unwrap());
        let filling = &found[1];
        assert_eq!((filling.resource, &*filling.name), ("ocisources", "base"));
        assert_eq!((filling.done_bytes, filling.total_bytes), (7, 9));
        assert_eq!((filling.since, filling.reported), (at(0), at(5)));
        assert_eq!((filling.copying_since, filling.done_before), (at(4), 3));
        // The numbers are those of an attempt that has ended.
        assert_eq!((found[0].reported, found[0].copying_since), (None, None));
        assert!(of_source(Kind::Oci, &Source::default()).is_empty());
    }
}
