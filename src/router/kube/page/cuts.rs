//! Lists of group snapshots, and of snapshots of single claims that schedules have made, with what their
//! contents say of their levels.

use std::collections::BTreeMap;

use ::kube::api::{Api, DynamicObject, ListParams};
use ::kube::core::{ApiResource, GroupVersionKind, PartialObjectMeta};
use ::kube::{Client, ResourceExt};
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;

use crate::error::{Result, chain};
use crate::router::kube::lists::first_pages;
use crate::router::kube::snapshot_contents;
use crate::telemetry::page::world::{Cut, CutState, Cuts};

/// Objects of one page of a list.
const PER_PAGE: u32 = 500;
/// Pages that are read. A cluster with more group snapshots is shown in part.
pub(super) const MAX_PAGES: usize = 4;

/// The label of a set of a schedule.
const SCHEDULE_UID: &str = "slackwater.dev/schedule-uid";
const LEVEL: &str = "slackwater.dev/level";
const CUT_AT: &str = "slackwater.dev/cut-at";
const FROZEN: &str = "slackwater.dev/frozen-ms";
const HELD: &str = "slackwater.dev/held-ms";

/// What is read.
struct Kind {
    contents: GroupVersionKind,
    name: &'static str,
    /// Where an object names its content.
    bound: &'static str,
    params: ListParams,
}

/// The snapshots of this driver: those of groups, and with `has_singles` those of single claims that schedules
/// have made. An error is reported in the result.
pub(super) async fn read(client: &Client, has_singles: bool) -> Cuts {
    let groups = snapshot_contents::group_contents()
        .into_iter()
        .map(|contents| Kind {
            contents,
            name: "VolumeGroupSnapshot",
            bound: "/status/boundVolumeGroupSnapshotContentName",
            params: ListParams::default(),
        });
    let mut cuts = first_of(client, groups.collect()).await;
    if has_singles {
        let singles = Kind {
            contents: snapshot_contents::snapshot_contents(),
            name: "VolumeSnapshot",
            bound: "/status/boundVolumeSnapshotContentName",
            params: ListParams::default().labels(SCHEDULE_UID),
        };
        let mut singles = first_of(client, vec![singles]).await;
        // Members of groups have no schedule of their own, whatever their labels are.
        singles.all.retain(|cut| cut.claim.is_some());
        cuts.all.append(&mut singles.all);
        cuts.problem = cuts.problem.or(singles.problem);
        cuts.is_cut_off |= singles.is_cut_off;
    }
    cuts
}

/// Those of the first kind that the cluster has.
async fn first_of(client: &Client, kinds: Vec<Kind>) -> Cuts {
    for kind in &kinds {
        match read_kind(client, kind).await {
            Ok(Some(cuts)) => return cuts,
            // The cluster does not have this version.
            Ok(None) => {}
            Err(error) => {
                return Cuts {
                    problem: Some(chain(&error)),
                    ..Cuts::default()
                };
            }
        }
    }
    Cuts::default()
}

async fn read_kind(client: &Client, kind: &Kind) -> Result<Option<Cuts>> {
    let contents = &kind.contents;
    let own = GroupVersionKind::gvk(&contents.group, &contents.version, kind.name);
    let api = Api::<DynamicObject>::all_with(client.clone(), &ApiResource::from_gvk(&own));
    let list = |params: ListParams| {
        let api = api.clone();
        async move { api.list(&params).await }
    };
    let what = format!("{}s", kind.name);
    let Some((snapshots, has_more)) =
        first_pages(&what, kind.params.clone().limit(PER_PAGE), MAX_PAGES, list).await?
    else {
        return Ok(None);
    };
    type Any = PartialObjectMeta<DynamicObject>;
    let api = Api::<Any>::all_with(client.clone(), &ApiResource::from_gvk(contents));
    let list = |params: ListParams| {
        let api = api.clone();
        async move { api.list_metadata(&params).await }
    };
    let what = format!("{}s", contents.kind);
    let params = ListParams::default().limit(PER_PAGE);
    let Some((contents, lacks_contents)) = first_pages(&what, params, MAX_PAGES, list).await?
    else {
        return Ok(None);
    };
    let annotations = contents.into_iter().map(|content| {
        let name = content.metadata.name.unwrap_or_default();
        (name, content.metadata.annotations.unwrap_or_default())
    });
    let annotations = annotations.collect();
    Ok(Some(Cuts {
        all: snapshots
            .iter()
            .filter_map(|it| cut(it, kind.bound, &annotations))
            .collect(),
        problem: None,
        is_cut_off: has_more || lacks_contents,
    }))
}

/// A snapshot; `None` if nothing shows that it is one of this driver.
fn cut(
    snapshot: &DynamicObject,
    bound: &str,
    contents: &BTreeMap<String, BTreeMap<String, String>>,
) -> Option<Cut> {
    let field = |path: &str| snapshot.data.pointer(path);
    let bound = field(bound).and_then(Value::as_str);
    let annotation = |name: &str| contents.get(bound?)?.get(name);
    let schedule = snapshot.labels().get(SCHEDULE_UID).cloned();
    let level = annotation(LEVEL).cloned();
    if schedule.is_none() && level.is_none() {
        return None;
    }
    let cut_at = annotation(CUT_AT).and_then(|at| at.parse::<Timestamp>().ok());
    let number = |name| annotation(name).and_then(|number| number.parse().ok());
    let created = snapshot.metadata.creation_timestamp.as_ref().map(|at| at.0);
    let error = field("/status/error/message").and_then(Value::as_str);
    let is_ready = field("/status/readyToUse").and_then(Value::as_bool) == Some(true);
    let state = match (is_ready, error) {
        _ if snapshot.metadata.deletion_timestamp.is_some() => CutState::Leaving,
        (true, _) => CutState::Ready,
        (false, Some(_)) => CutState::Failed,
        (false, None) => CutState::Unready,
    };
    Some(Cut {
        namespace: snapshot.namespace().unwrap_or_default(),
        name: snapshot.name_any(),
        schedule,
        claim: field("/spec/source/persistentVolumeClaimName")
            .and_then(Value::as_str)
            .map(String::from),
        at: cut_at.or(created)?,
        level,
        frozen_ms: number(FROZEN),
        held_ms: number(HELD),
        state,
        error: error.filter(|_| !is_ready).map(String::from),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn group(labels: &Value, status: &Value) -> DynamicObject {
        let object = json!({"metadata": {"name": "g", "namespace": "shop", "labels": labels,
            "creationTimestamp": "2026-01-02T03:04:05Z"}, "status": status});
        serde_json::from_value(object).unwrap()
    }

    fn contents(annotations: &[(&str, &str)]) -> BTreeMap<String, BTreeMap<String, String>> {
        let all = annotations.iter();
        let all = all.map(|(name, value)| (format!("slackwater.dev/{name}"), (*value).into()));
        [("content".to_string(), all.collect())].into()
    }

    const BOUND: &str = "boundVolumeGroupSnapshotContentName";

    fn cut(
        group: &DynamicObject,
        contents: &BTreeMap<String, BTreeMap<String, String>>,
    ) -> Option<Cut> {
        super::cut(group, &format!("/status/{BOUND}"), contents)
    }

    #[test]
    fn level_and_time_of_a_group_are_those_of_its_content() {
        let ready = group(&Value::Null, &json!({BOUND: "content", "readyToUse": true}));
        let known = contents(&[
            ("level", "crash"),
            ("cut-at", "2026-01-02T03:00:00Z"),
            ("frozen-ms", "17"),
            ("held-ms", "long"),
        ]);
        let found = cut(&ready, &known).unwrap();
        assert_eq!((found.frozen_ms, found.held_ms), (Some(17), None));
        assert_eq!(found.level.as_deref(), Some("crash"));
        assert_eq!(found.at.to_string(), "2026-01-02T03:00:00Z");
        assert_eq!(found.state, CutState::Ready);
        let wrong = contents(&[("level", "crash"), ("cut-at", "yesterday")]);
        let found = cut(&ready, &wrong).unwrap();
        assert_eq!(found.at.to_string(), "2026-01-02T03:04:05Z", "its creation");
    }

    #[test]
    fn groups_of_other_drivers_are_not_shown() {
        let status = json!({BOUND: "content", "readyToUse": true});
        assert!(cut(&group(&Value::Null, &status), &contents(&[])).is_none());
        let scheduled = group(&json!({SCHEDULE_UID: "u"}), &Value::Null);
        let found = cut(&scheduled, &contents(&[])).unwrap();
        assert_eq!((found.state, found.level), (CutState::Unready, None));
    }

    #[test]
    fn a_failed_group_has_its_error() {
        let status = json!({"readyToUse": false, "error": {"message": "no space"}});
        let found = cut(&group(&json!({SCHEDULE_UID: "u"}), &status), &contents(&[])).unwrap();
        assert_eq!(found.state, CutState::Failed);
        assert_eq!(found.error.as_deref(), Some("no space"));
    }
}
