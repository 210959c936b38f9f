-- What auth_request cannot do: read a prompt, and report to kv-router.

local HOST, PORT = "127.0.0.1", 8092

local module = {}

-- A quote within a text has a backslash before it, so that no text of a prompt matches.
function module.read_tokens()
    ngx.req.read_body()
    local body = ngx.req.get_body_data() or ""
    local tokens = body:match('"prompt"%s*:%s*(%[[%d%s,]+%])')
    if not tokens then
        local answer = ngx.location.capture("/_tokenize", {method = ngx.HTTP_POST, body = body})
        tokens = answer.status == 200 and answer.body:match('"tokens"%s*:%s*(%[[%d%s,]*%])')
    end
    if not tokens then return ngx.exit(ngx.HTTP_BAD_REQUEST) end
    ngx.var.kv_tokens = tokens
end

local function report(_, method, path)
    local socket = ngx.socket.tcp()
    socket:settimeout(5000)
    if not socket:connect(HOST, PORT) then return end
    local head = method .. " /reservations/" .. path .. " HTTP/1.1\r\nhost: router\r\n"
    socket:send(head .. "content-length: 0\r\nconnection: close\r\n\r\n")
    socket:receive("*l")
    socket:close()
end

-- Neither phase may wait, so timers report.
function module.report_first()
    local id = ngx.var.kv_id
    if ngx.ctx.is_prefilled or not id or id == "" or ngx.arg[1] == "" then return end
    ngx.ctx.is_prefilled = true
    ngx.timer.at(0, report, "POST", id .. "/prefill_complete")
end

function module.report_end()
    local id = ngx.var.kv_id
    if id and id ~= "" then ngx.timer.at(0, report, "DELETE", id) end
end

return module
