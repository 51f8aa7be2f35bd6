//! The claims of a restore whose source namespace is gone. The name of a claim is in no content: it is known
//! from the PersistentVolume of the claim, if that exists, or the user gives it.

use std::collections::{BTreeMap, BTreeSet};

use super::contents::{Source, SourceSnapshot};
use super::objects::{Member, Record};
use crate::cli::RestoreArguments;
use crate::failure::{Failure, Result};
use crate::restore::plan::{copy, pattern_of, pattern_of_volume};
use crate::restore::stateful_set::claim_names::is_valid;
use crate::text::size;

/// The snapshots with the claims that they become, sorted by them.
pub fn members(source: Source, arguments: &RestoreArguments, to: &str) -> Result<Vec<Member>> {
    let given = given(&source, &arguments.claims)?;
    let claims = claims(&source, &given, arguments)?;
    let many = source.members.len();
    let mut members = Vec::new();
    for (found, claim) in source.members.into_iter().zip(claims) {
        let of_record = |it: &Record| pattern_of(&it.class, &it.mode, &it.access_modes);
        let like = match &found.volume {
            Some(volume) => Some(pattern_of_volume(volume)),
            None => found.record.as_ref().map(of_record),
        };
        let copy = copy(claim, &found.snapshot, like, None, arguments)?;
        let record = Record {
            source: source.key.clone(),
            content: found.snapshot.content.clone(),
            uid: found.snapshot.uid.clone(),
            namespace: to.into(),
            claim: copy.claim.clone(),
            restore_bytes: found.snapshot.restore_bytes,
            mode: copy.mode.clone(),
            class: copy.class.clone(),
            access_modes: copy.access_modes.clone(),
            members: many,
        };
        members.push(Member { copy, record });
    }
    members.sort_by(|a, b| a.copy.claim.cmp(&b.copy.claim));
    Ok(members)
}

/// The names that the user gives, by the name of the content.
fn given(source: &Source, words: &[String]) -> Result<BTreeMap<String, String>> {
    let mut given = BTreeMap::new();
    for word in words {
        let (found, name) = match (word.split_once('='), &source.members[..]) {
            (None, [one]) => (one, word.as_str()),
            (None, _) => {
                return Err(Failure::usage(format!(
                    "--claim {word}: a group needs CONTENT=NAME, for each of its members whose claim is not known"
                )));
            }
            (Some((key, name)), members) => {
                let is_its =
                    |it: &&SourceSnapshot| it.snapshot.content == key || it.snapshot.handle == key;
                let Some(found) = members.iter().find(is_its) else {
                    return Err(Failure::usage(format!(
                        "--claim {word}: no VolumeSnapshotContent {key} is restored"
                    )));
                };
                (found, name)
            }
        };
        if given
            .insert(found.snapshot.content.clone(), name.to_string())
            .is_some()
        {
            return Err(Failure::usage(format!(
                "--claim {word}: the content has a name already"
            )));
        }
    }
    Ok(given)
}

/// The names of the claims, in the order of the members.
fn claims(
    source: &Source,
    given: &BTreeMap<String, String>,
    arguments: &RestoreArguments,
) -> Result<Vec<String>> {
    let (mut claims, mut unknown) = (Vec::new(), Vec::new());
    for found in &source.members {
        let one = &found.snapshot;
        let base = given.get(&one.content).unwrap_or(&one.claim);
        claims.push(match (base.as_str(), &arguments.suffix, &found.record) {
            // With the suffix of the earlier run.
            ("", _, Some(record)) => record.claim.clone(),
            ("", _, None) => {
                let bytes = size(one.restore_bytes);
                unknown.push(format!("{} ({}, {bytes})", one.content, one.handle));
                continue;
            }
            (base, None, _) => base.to_string(),
            (base, Some(suffix), _) => format!("{base}-{suffix}"),
        });
    }
    if !unknown.is_empty() {
        return Err(Failure::usage(format!(
            "the claims of these snapshots are not known, because their PersistentVolumes are gone: {}. Give --claim CONTENT=NAME for each",
            unknown.join(", ")
        )));
    }
    let mut distinct = BTreeSet::new();
    for claim in &claims {
        if !is_valid(claim) {
            return Err(Failure::usage(format!(
                "{claim} cannot be the name of a claim: names have lowercase letters, digits, - and ., and at most 253 characters"
            )));
        }
        if !distinct.insert(claim) {
            return Err(Failure::usage(format!(
                "two snapshots would be restored into the claim {claim}: give --claim CONTENT=NAME"
            )));
        }
    }
    Ok(claims)
}
