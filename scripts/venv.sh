# shellcheck shell=bash
# The project's virtual environment, for ./check and ./demo. To be sourced from the repository root.
#
#   ensure_venv run     the package and its runtime dependencies
#   ensure_venv torch   the same, and torch, at the versions of requirements-dev.txt
#   ensure_venv dev     the same, and everything else in requirements-dev.txt
#
# A stamp in .venv holds the digest of the files that decide what is installed; nothing is
# installed again while it matches. PYTHON chooses the interpreter for a new environment.

VENV=.venv

_usable_python() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

_find_python() {
  if [[ -n "${PYTHON:-}" ]]; then
    if _usable_python "$PYTHON"; then
      echo "$PYTHON"
      return
    fi
    echo "PYTHON=$PYTHON is not a Python 3.11 or newer" >&2
    return 1
  fi
  local candidate
  for candidate in python3.13 python3.12 python3.11 python3; do
    if _usable_python "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  echo "no Python 3.11 or newer found; install one, or name it with PYTHON=..." >&2
  return 1
}

_requirements_digest() {
  "$VENV/bin/python" - pyproject.toml requirements-dev.txt <<'PY'
import hashlib, pathlib, sys
digest = hashlib.sha256()
for name in sys.argv[1:]:
    digest.update(pathlib.Path(name).read_bytes() + b"\0")
print(digest.hexdigest())
PY
}

ensure_venv() {
  local kind=$1 python digest stamp
  if ! _usable_python "$VENV/bin/python"; then
    python=$(_find_python) || return
    echo "making $VENV with $("$python" -V)"
    # Some distributions ship Python without ensurepip; then the outer pip installs into .venv.
    "$python" -m venv --clear "$VENV" >/dev/null 2>&1 ||
      "$python" -m venv --clear --without-pip "$VENV" || return
  fi

  digest=$(_requirements_digest) || return
  # What to install, and the kinds that would do: each has all that the ones above it have.
  local what kinds
  case "$kind" in
    run) what=(-e .) kinds=(run torch dev) ;;
    torch) what=(-e '.[torch]' -c requirements-dev.txt) kinds=(torch dev) ;;
    dev) what=(-e . -r requirements-dev.txt) kinds=(dev) ;;
  esac
  for stamp in "${kinds[@]/#/$VENV/.installed-}"; do
    if [[ -f "$stamp" && "$(<"$stamp")" == "$digest" ]]; then
      return 0
    fi
  done

  local pip=("$VENV/bin/python" -m pip)
  if ! "${pip[@]}" --version >/dev/null 2>&1; then
    python=$(_find_python) || return
    pip=("$python" -m pip --python "$VENV/bin/python")
  fi
  echo "installing into $VENV (once, until the requirements change)"
  if [[ "$kind" != run ]]; then
    echo "pip's own settings choose the build of torch: one for CPUs is enough, and far smaller"
  fi
  # Compiled when first imported: of torch's modules, that is half.
  "${pip[@]}" install --quiet --no-compile --disable-pip-version-check "${what[@]}" || return
  echo "$digest" >"$VENV/.installed-$kind"
}
