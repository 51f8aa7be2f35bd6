//! Fuzzing of the router's requests: bytes are decoded as the agent decodes them, then parsed.

use prost::Message;
use slackwater_core::fuzz::fuzz_message;

use super::cut::{begin, decision, group_id, how, step};
use super::describe::named;
use super::*;
use crate::agent::cut_request::{Begin, Keep, Step};
use crate::agent::find_request::Kind;
use crate::agent::import_request::Options;
use crate::agent::receive_request::{self, Source};
use crate::agent::{
    ExportRequest, ImportFileRequest, ImportRequest, ReadRequest, SnapshotForCloneRequest,
    SnapshotOffer,
};
use crate::csi;
use crate::model::SnapshotId;
use crate::service::{admin, peer};

const ID: &str = "6f1a2b3c-0000-4000-8000-000000000001";

#[test]
fn fuzz_find() {
    let valid = FindRequest {
        kind: Kind::Volume.into(),
        name: "pvc-1".into(),
        pool: "default".into(),
    };
    fuzz_message("Find", &valid, named);
}

#[test]
fn fuzz_describe_volumes() {
    let valid = DescribeVolumesRequest {
        volume_ids: vec![format!("{ID}.{ID}")],
    };
    fuzz_message("DescribeVolumes", &valid, |request| {
        describe_volumes::ids(request.clone())
    });
}

#[test]
fn fuzz_adopt_and_forget_pools() {
    let valid = AdoptPoolRequest { pool_id: ID.into() };
    fuzz_message("AdoptPool", &valid, |request| {
        adopt_pool::pool_id(&request.pool_id)
    });
    let valid = ForgetPoolRequest { pool_id: ID.into() };
    fuzz_message("ForgetPool", &valid, |request| {
        adopt_pool::pool_id(&request.pool_id)
    });
}

#[test]
fn fuzz_first_and_last_steps_of_a_cut() {
    let volume = || vec![format!("{ID}.{ID}")];
    let first = Begin {
        name: "group-1".into(),
        group_id: ID.into(),
        attempt: ID.into(),
        parameters: [("consistency".into(), "application".into())].into(),
        source_volume_ids: volume(),
        all_source_volume_ids: volume(),
        level: "application".into(),
        requisite_homes: vec![ID.into()],
        ..Begin::default()
    };
    let valid = CutRequest {
        step: Some(Step::Begin(first)),
    };
    fuzz_message("Cut", &valid, |request| begin(request.step.clone()));
    let last = Keep {
        cut_at: 1_700_000_000,
        level: "filesystem".into(),
        reason: "no hook".into(),
    };
    let valid = CutRequest {
        step: Some(Step::Keep(last)),
    };
    let parse = |request: &CutRequest| step(request.step.clone()).ok_or(());
    fuzz_message("Cut, the step keep", &valid, parse);
}

#[test]
fn fuzz_requests_about_groups() {
    let valid = GetGroupRequest {
        group_id: ID.into(),
        snapshot_ids: vec![format!("{ID}.{ID}")],
    };
    let parse = |request: &GetGroupRequest| group_id(&request.group_id);
    fuzz_message("GetGroup", &valid, parse);
    let valid = SettleGroupRequest {
        group_id: ID.into(),
        attempt: ID.into(),
        undone_attempts: vec![ID.into()],
    };
    fuzz_message("SettleGroup", &valid, decision);
    let valid = DeleteGroupRequest {
        group_id: ID.into(),
        snapshot_ids: vec![format!("{ID}.{ID}")],
    };
    let parse = |request: &DeleteGroupRequest| group_id(&request.group_id);
    fuzz_message("DeleteGroup", &valid, parse);
    let valid = DeleteOneRequest {
        snapshot_id: format!("{ID}.{ID}"),
        of_any_group: true,
        settled_group_id: ID.into(),
    };
    fuzz_message("DeleteOne", &valid, how);
}

#[test]
fn fuzz_requests_about_snapshots_of_other_nodes() {
    let valid = OfferRequest {
        snapshot_id: format!("{ID}.{ID}"),
        reader_node: "node-1".into(),
        base_snapshot_ids: vec!["base".into()],
    };
    let parse = |request: &OfferRequest| request.snapshot_id.parse::<SnapshotId>();
    fuzz_message("Offer", &valid, parse);
    let offer = SnapshotOffer {
        ticket: vec![7; 32],
        identity: 1,
        size_bytes: 1 << 30,
        image_bytes: 1 << 30,
        block_size: 512,
        formatted: String::new(),
        base_identities: vec![2],
    };
    let valid = ReceiveRequest {
        create: csi::CreateVolumeRequest::default().encode_to_vec(),
        source_node: "node-1".into(),
        source_address: "10.0.0.1:9821".into(),
        source: Some(Source::Offer(offer)),
        verify: true,
        purpose: receive_request::Purpose::Fill.into(),
        snapshot_id: "snapshot".into(),
    };
    let parse = |request: &ReceiveRequest| match &request.source {
        Some(Source::Offer(offer)) => peer::parse(offer.clone()).map(drop).map_err(drop),
        Some(Source::Problem(problem)) => {
            let purpose = peer::purpose(request).map_err(drop)?;
            peer::cannot_be_read("node-1", problem.clone(), purpose);
            Ok(())
        }
        None => Err(()),
    };
    fuzz_message("Receive", &valid, parse);
    let valid = ReadRequest {
        ticket: vec![7; 32],
        from: 4096,
        only_digests: true,
        base_identity: Some(3),
        crc32: true,
    };
    let parse = |request: &ReadRequest| peer::ticket(&request.ticket);
    fuzz_message("Read", &valid, parse);
}

#[test]
fn fuzz_requests_of_clones() {
    let valid = SnapshotForCloneRequest {
        volume_id: format!("{ID}.{ID}"),
        volume_name: "clone".into(),
        delete: true,
    };
    let parse = |asked: &SnapshotForCloneRequest| peer::for_clone(asked.clone());
    fuzz_message("SnapshotForClone", &valid, parse);
}

#[test]
fn fuzz_requests_of_moves() {
    let valid = FenceRequest {
        volume_id: format!("{ID}.{ID}"),
        move_uid: ID.into(),
        lift: true,
    };
    let parse = |request: &FenceRequest| moving::of_move(&request.volume_id, &request.move_uid);
    fuzz_message("Fence", &valid, parse);
    let valid = SnapshotForMoveRequest {
        volume_id: format!("{ID}.{ID}"),
        move_uid: ID.into(),
        round: 1,
        base_round: 2,
    };
    let parse =
        |request: &SnapshotForMoveRequest| moving::of_move(&request.volume_id, &request.move_uid);
    fuzz_message("SnapshotForMove", &valid, parse);
    let valid = DeleteMovedRequest {
        volume_id: format!("{ID}.{ID}"),
        move_uid: ID.into(),
    };
    let parse =
        |request: &DeleteMovedRequest| moving::of_move(&request.volume_id, &request.move_uid);
    fuzz_message("DeleteMoved", &valid, parse);
    let valid = LookForMoveRequest {
        volume_id: format!("{ID}.{ID}"),
        snapshot_ids: vec![format!("{ID}.{ID}")],
    };
    let parse = |request: &LookForMoveRequest| {
        let ids = request.snapshot_ids.iter().chain([&request.volume_id]);
        ids.map(|id| id.parse::<SnapshotId>())
            .collect::<Result<Vec<_>, _>>()
    };
    fuzz_message("LookForMove", &valid, parse);
}

#[test]
fn fuzz_requests_of_reverts() {
    let valid = RevertRequest {
        volume_id: format!("{ID}.{ID}"),
        revert_uid: ID.into(),
        step: crate::agent::revert_request::Step::Begin.into(),
        name: "shop/back".into(),
        snapshot_id: format!("{ID}.{ID}"),
        number: 1,
        members: 2,
        members_digest: ID.into(),
    };
    fuzz_message("Revert", &valid, reverting::parsed);
    let valid = LookForRevertRequest {
        volume_id: format!("{ID}.{ID}"),
        snapshot_id: format!("{ID}.{ID}"),
    };
    let parse = |request: &LookForRevertRequest| {
        let ids = [&request.volume_id, &request.snapshot_id];
        let ids = ids.map(|id| id.parse::<SnapshotId>());
        ids.into_iter().collect::<Result<Vec<_>, _>>()
    };
    fuzz_message("LookForRevert", &valid, parse);
}

#[test]
fn fuzz_archives() {
    let valid = ExportRequest {
        snapshot_ids: vec![format!("{ID}.{ID}")],
        base_snapshot_ids: vec![format!("{ID}.{ID}")],
    };
    fuzz_message("Export", &valid, |request| admin::export(request.clone()));
    let valid = ImportRequest {
        options: Some(Options {
            name: "data".into(),
            size_bytes: 1 << 30,
            ..Options::default()
        }),
        data: b"SLACKWATER".to_vec(),
    };
    fuzz_message("Import", &valid, admin::import);
    let valid = ImportFileRequest {
        options: valid.options,
        path: "/var/csi/rawfile/pvc-1/disk.img".into(),
        identity: 7,
        dry_run: true,
    };
    fuzz_message("ImportFile", &valid, admin::import_file);
}
