"""Error codes of refusals and what they mean. `python -m cflpriv.federation.error_codes` prints docs/reference/error_codes.md."""

from collections.abc import Mapping
from itertools import groupby

from ..generated_pages import generated_page
from ..streams import print_file

__all__ = ["MEANINGS", "SKIPPED", "page"]

CLIENTS: dict[str, str] = {
    "malformed": "the message is not one of this protocol, or of another shape than those of other clients; a round goes on without it",
    **dict.fromkeys(("version", "unknown-task"), "server and client have different versions"),
    "no-settings": "no settings file is named for the client, or there is none where it should be",
    "bad-settings": "the client's settings file cannot be used; see the client's log",
    "not-on-roster": "the client's identity is not on its roster",
    **dict.fromkeys(("other-identity", "unknown-client"), "the identity does not fit the roster, an earlier enrolment, or what was agreed"),
    "two-places": "two places answered as this client at once, and the later one counts: two nodes have the same settings file or identity",
    "wrong-session": "the client is not enrolled in this session (the next round enrols it), or has left it for another, which is final",
    "forbidden": "the client's own settings forbid this: its protection, the privacy that it demands, or its release policy",
    "no-contract": "the client's own settings need a session contract, and the server sent none, or none any more",
    "other-contract": "the session contract is not one that the client's own settings allow, or not that of the session",
    "contract-used": "the client has answered under this session contract in another session; give a second run another `[run] name`",
    "not-agreed": "the request is not in the session contract: another task, a round that has passed, or once more than declared",
    "set-back": "the client answered in later rounds than its state knows of: a restored backup, or a lost state",
    "over-budget": "the client has released all that its own privacy budget allows",
    "too-many-epochs": "the client's vectors are in as many encrypted or shared epochs as its own `most_epochs` allows, over all sessions",
    "used-transform": "the client has used this transform already; a transform serves one clustering epoch or one sum",
    "second-sum": "the client has contributed a value of this round or model to a sum already, and the server asks for another over other "
    "clients, with another weight or clip, or of another kind (a second run from the same initial model: take another `[run] seed`)",
    "too-little-noise": "helpers would add less noise to a secure sum than the client insists on",
    "cohort-change": "the clients of a secure sum differ from those of the last one by too few (`protection.cohort_change`)",
    "too-unequal": "weights, or weights inside a value, could let one client dominate a secure sum",
    "no-secret": "the client does not have the clients' common secret yet; a member gives it the secret in the next round",
    "not-held": "the client does not hold the value asked for: it lost its state, or the value was dropped",
    "bad-input": "the parameters do not fit the task, or are not finite; without a protection also: the client's data do not fit",
    "bad-result": "the application's train function returned no arrays, or not the model's by names, shapes and floating dtypes, or zeros "
    "in place of an array that had others; see the client's log",
    "old-result": "the application's train function returned arrays that it returned, or was sent, in an earlier round with another model",
    "no-examples": "the application's train function stated no number of examples of 1 or more, which weighs its update",
    "no-signature": "the application's signature is not one: a few orthonormal rows as long as a sample, all numbers finite",
    "too-large": "the task, or its parameters, are over `[limits]` of the client's own settings",
    "removed": "the client was removed for good",
    "internal": "the client failed; see its own log",
}
"""Codes with which a client refuses a request."""

PROTOCOLS: dict[str, str] = {
    "too-few-clients": "members or survivors are below the client's own minimum cohort size",
    "minimum-too-low": "the minimum cohort size of a sum is below the client's own",
    "unlisted-model": "the client's model is not among those that the sum lists, or the sum lists more than the client allows",
    **dict.fromkeys(
        ("not-invited", "wrong-roster", "bad-terms"),
        "terms that the client does not accept: a cohort without it, another roster, impossible numbers, another limit of weights",
    ),
    **dict.fromkeys(("wrong-context", "wrong-slot", "old-slot", "wrong-epoch"), "other terms; another or past session, sum or epoch"),
    **dict.fromkeys(
        ("wrong-stage", "replay"),
        "not the message that is due: sent twice, or state was lost; the client is in the next sum",
    ),
    **dict.fromkeys(("bad-signature", "unexpected-signature"), "a signature does not fit the roster"),
    **dict.fromkeys(
        ("bad-key", "repeated-key", "bad-box", "wrong-client", "wrong-sender"),
        "keys or boxes are not from their declared sender; a client reports it if none of its boxes opens",
    ),
    **dict.fromkeys(("bad-members", "bad-survivors", "repeated"), "members or survivors are not what was agreed"),
    **dict.fromkeys(("wrong-shares", "wrong-length", "wrong-advert", "wrong-complaint"), "an answer of the wrong shape"),
    **dict.fromkeys(
        ("wrong-share", "false-shares", "false-secret"),
        "the client revealed, opened or dealt other shares than it was bound to; it is in no later sum of the session",
    ),
    "too-many-complaints": "more complaints about the client's shares than it may answer",
    "bad-dealing": "robust rules: nonces and commitments do not match each other or the client's list, or fewer than three "
    "buckets",
    "wrong-bucket": "robust rules: the cohort of a secure sum is not within the bucket of this client",
    "too-far": "a numbered key beyond the last one, or more kept than allowed",
    **dict.fromkeys(
        (
            "wrong-identity", "no-roster", "entropy", "dead", "mask-key-used", "bad-values", "too-coarse", "unexpected-values",
            "out-of-range",
        ),
        "the client's machine stopped: files exchanged, the random source failed, or values that cannot be encoded",
    ),
    "bad-deposit": "under `shares`: what the client deposited for a comparison cannot be used; it is left out",
    **dict.fromkeys(
        ("bad-contributors", "other-keys", "other-contribution", "too-few-holders"),
        "under `shares`: other holders, keys or lists than agreed",
    ),
    "inconsistent": "under `shares`: the sum is no Gram matrix within the bound",
    **dict.fromkeys(
        ("other-seed", "second-message", "too-many-clients"),
        "under `one_message`: the client dealt unequal seeds, sent a second upload, or is one too many; the upload is left out",
    ),
    **dict.fromkeys(
        ("second-set", "not-delivered", "wrong-round", "too-few-signatures"),
        "under `one_message`: a helper signs or opens one set of clients for a sum, and none without a quorum",
    ),
    **dict.fromkeys(("masks-differ", "too-few-helpers"), "under `one_message`: a helper sent false masks, or too few helpers answered"),
    **dict.fromkeys(
        ("over-cap", "not-enrolled", "enrolled-before", "answered-before"), "limits of the key holder: pairs, steps, each pair once"
    ),
    **dict.fromkeys(
        ("no-tenseal", "bad-parameters", "too-long", "too-noisy", "wrong-mode", "worker-ended"),
        "encrypted similarity: no TenSEAL, or sizes do not fit",
    ),
    **dict.fromkeys(("bad-advert", "missing-block", "no-result", "finished"), "in the server's log: a sum ended without a result"),
}  # fmt: skip
"""Codes of the protocols, from a client, or noted by the server when it leaves a client's message out of a sum."""

SKIPPED: dict[str, str] = {
    "too-few-clients": "fewer clients than the minimum cohort size",
    "clients-lost": "clients dropped out of a comparison, which was repeated up to five times",
    "key-holder-lost": "the key holder did not answer, refused, or gave an answer that was refused",
    "epoch-ended": "new clients cannot be compared with an encrypted epoch of an earlier process",
    "budget-exceeded": "the privacy budget is spent; the run ends with what it has",
}
"""Why the server skipped a step: `skipped` in `rounds.jsonl`."""

MEANINGS: Mapping[str, str] = {**PROTOCOLS, **CLIENTS}
"""Error codes of refusals and their meaning."""

_HEAD = """For operators of a federation. The texts are in `cflpriv/federation/error_codes.py`.

`summary.json` lists refusals as (client, stage, error code). No text of an exception reaches the server: the client's log has the reason.
"""


def page() -> str:
    """docs/reference/error_codes.md."""
    lines = [_HEAD]
    for title, meanings in (
        ("A client refuses a request", CLIENTS),
        ("A party refuses a message of a protocol", PROTOCOLS),
        ("The server skips a step", SKIPPED),
    ):
        lines += [f"## {title}\n", "| code | meaning |", "|---|---|"]
        for meaning, rows in groupby(meanings.items(), key=lambda row: row[1]):
            lines.append(f"| {', '.join(f'`{code}`' for code, _ in rows)} | {meaning[0].upper()}{meaning[1:]} |")
        lines.append("")
    text = "\n".join(lines).rstrip() + "\n"
    return generated_page("Error codes", "python -m cflpriv.federation.error_codes > docs/reference/error_codes.md", text)


if __name__ == "__main__":
    print_file(page())
